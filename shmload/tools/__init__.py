"""The work behind the commands of `shmload`. In the package, only the command line (`cli/`) imports these files."""
