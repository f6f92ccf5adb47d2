"""examples/kuberay.yaml: everything that KubeRay needs is there, and the numbers fit the loader of its program."""

from __future__ import annotations

import ast
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml

from shmload.engine.worker_set import num_slots

MANIFEST = next(p / "examples" for p in Path(__file__).parents if (p / "examples" / "kuberay.yaml").exists()) / "kuberay.yaml"
CONFIG, CLUSTER, JOB = yaml.safe_load_all(MANIFEST.read_text())
PROGRAM = CONFIG["data"]["train.py"]
GROUPS = {"head": CLUSTER["spec"]["headGroupSpec"], **{group["groupName"]: group for group in CLUSTER["spec"]["workerGroupSpecs"]}}
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}
PREFETCH_FACTOR = 2  # default of ShmLoader
PYTHON_NBYTES = 2 << 30  # Ray's processes, torch, the program


def nbytes(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def constants() -> dict[str, Any]:
    """Returns the program's constants."""
    found: dict[str, Any] = {}
    for node in ast.parse(PROGRAM).body:
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            names = [ast.unparse(name) for name in getattr(target, "elts", [target])]
            values = ast.literal_eval(node.value)
            found |= dict(zip(names, values, strict=True)) if len(names) > 1 else {names[0]: values}
    return found


def batch_nbytes() -> int:
    """Returns the bytes of a batch: the images and an int64 per sample."""
    return int(constants()["BATCH_SIZE"]) * (prod(constants()["SHAPE"]) + 8)


def container(group: dict[str, Any]) -> Any:
    (only,) = group["template"]["spec"]["containers"]
    return only


def shm_nbytes(group: dict[str, Any]) -> int:
    (name,) = (mount["name"] for mount in container(group)["volumeMounts"] if mount["mountPath"] == "/dev/shm")
    (volume,) = (volume["emptyDir"] for volume in group["template"]["spec"]["volumes"] if volume["name"] == name)
    assert volume["medium"] == "Memory"
    return nbytes(volume["sizeLimit"])


def test_config_has_a_program_a_cluster_and_a_job() -> None:
    assert [(one["apiVersion"], one["kind"]) for one in (CONFIG, CLUSTER, JOB)] == [
        ("v1", "ConfigMap"),
        ("ray.io/v1", "RayCluster"),
        ("ray.io/v1", "RayJob"),
    ]
    assert JOB["spec"]["clusterSelector"] == {"ray.io/cluster": CLUSTER["metadata"]["name"]}
    assert CLUSTER["spec"]["enableInTreeAutoscaling"] is True
    trainer = GROUPS["trainer"]
    assert {"name": "program", "configMap": {"name": CONFIG["metadata"]["name"]}} in trainer["template"]["spec"]["volumes"]
    (folder,) = (mount["mountPath"] for mount in container(trainer)["volumeMounts"] if mount["name"] == "program")
    assert JOB["spec"]["entrypoint"] == f"python {folder}/train.py"


def test_image_is_the_same_everywhere() -> None:
    assert len({container(group)["image"] for group in GROUPS.values()}) == 1
    assert tuple(map(int, CLUSTER["spec"]["rayVersion"].split("."))) >= (2, 40)  # as in the extra


@pytest.mark.parametrize("name", GROUPS)
def test_pod_has_enough_memory_for_its_shared_memory(name: str) -> None:
    group = GROUPS[name]
    assert all(isinstance(value, str) for value in group["rayStartParams"].values())  # KubeRay accepts nothing else
    resources = container(group)["resources"]
    assert resources["requests"] == resources["limits"]  # guaranteed memory cannot be taken by other pods
    limits = resources["limits"]
    assert shm_nbytes(group) >= int(group["rayStartParams"]["object-store-memory"])
    assert nbytes(limits["memory"]) >= shm_nbytes(group) + PYTHON_NBYTES  # a tmpfs counts as memory
    assert int(group["rayStartParams"]["num-cpus"]) <= int(limits["cpu"])


def test_trainers_pod_has_memory_for_ring_and_batches_and_no_cpu_for_actors() -> None:
    trainer, num_ordered = GROUPS["trainer"], constants()["NUM_WORKERS"] * PREFETCH_FACTOR
    store = int(trainer["rayStartParams"]["object-store-memory"])
    assert store >= num_ordered * batch_nbytes()
    assert shm_nbytes(trainer) >= store + num_slots(num_ordered) * batch_nbytes()
    assert trainer["minReplicas"] == trainer["replicas"] == trainer["maxReplicas"] == 1
    assert int(trainer["rayStartParams"]["num-cpus"]) == JOB["spec"]["entrypointNumCpus"] == 1
    assert int(container(trainer)["resources"]["limits"]["nvidia.com/gpu"]) == JOB["spec"]["entrypointNumGpus"] == 1
    assert GROUPS["head"]["rayStartParams"]["num-cpus"] == "0"


def test_decoders_have_a_cpu_per_actor_and_memory_for_batches() -> None:
    decoders = GROUPS["decoders"]
    num_cpus = int(decoders["rayStartParams"]["num-cpus"])
    assert num_cpus == int(container(decoders)["resources"]["limits"]["cpu"])
    assert decoders["maxReplicas"] * num_cpus == constants()["NUM_WORKERS"]
    assert decoders["minReplicas"] == 0
    assert int(decoders["rayStartParams"]["object-store-memory"]) >= num_cpus * PREFETCH_FACTOR * batch_nbytes()


def test_program_is_valid_and_its_loader_uses_the_cluster() -> None:
    compile(PROGRAM, "train.py", "exec")
    assert '"num_workers": NUM_WORKERS, "backend": Ray(' in PROGRAM
