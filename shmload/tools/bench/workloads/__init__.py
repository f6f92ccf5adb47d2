"""The built-in workloads: one file each, one table.

A workload names its dataset as `module:class`, like a user's own, and prepares the arguments once in the parent:
files that are written on the fly live in a temporary folder. Contents are photographs or random numbers, never zeros,
which some memory systems deliver faster. Every draw is keyed by the sample's index, so that two loaders must deliver
the same bytes.
"""

from shmload.tools.bench.workloads.photos import PHOTOS
from shmload.tools.bench.workloads.plain import PLAIN
from shmload.tools.bench.workloads.records import RECORDS
from shmload.tools.bench.workloads.rows import ROWS
from shmload.tools.bench.workloads.tokens import TOKENS
from shmload.tools.bench.workloads.workload import Workload

WORKLOADS: dict[str, Workload] = {each.name: each for each in (PHOTOS, RECORDS, ROWS, TOKENS, PLAIN)}
