"""Shared memory and bells between processes: the only room that uses /dev/shm, memfd and the resource tracker."""
