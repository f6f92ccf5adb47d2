"""Memory and bells that processes share: the only place that knows /dev/shm, memfd and the resource tracker."""
