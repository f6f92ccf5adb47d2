"""The exactly-once check of audit records, for `shmload verify`."""
