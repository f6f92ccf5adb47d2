"""`python -m shmload`: the `shmload` command without an installed script."""

from shmload.cli import main

if __name__ == "__main__":
    main()
