"""`python -m shmload.cli`: the command without an installed script."""

from shmload.cli import main

if __name__ == "__main__":
    main()
