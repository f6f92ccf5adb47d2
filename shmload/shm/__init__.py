"""Shared memory and bells between processes: the only place that knows /dev/shm, memfd and the resource tracker."""
