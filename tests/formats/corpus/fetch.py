"""Download source archives from the configured package index without building them.

    python -m tests.formats.corpus.fetch FOLDER NAME==VERSION...

`pip download` builds a source package to get its metadata. Here pip only finds each archive and downloads it through its own cache,
so
that a second run needs the index but not the files.
"""

from __future__ import annotations

import sys

from pip._internal.commands import create_command
from pip._internal.network.download import Downloader
from pip._vendor.packaging.specifiers import SpecifierSet

UNREACHABLE = 3  # exit status


def fetch(folder: str, wanted: list[str]) -> None:
    """Downloads the archive of each `name==version` into the folder and print its path.

    Raises:
        ConnectionError: the index has no archive of that name, which means that it cannot be reached.
        LookupError: the index lacks this version.
    """
    command = create_command("download")
    options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", "--quiet", "--retries", "1", "--timeout", "20"])
    with command.main_context(), command._build_session(options) as session:
        finder = command._build_package_finder(options, session)
        for entry in wanted:
            name, _, version = entry.partition("==")
            if not finder.find_all_candidates(name):
                raise ConnectionError(f"no source archive of {name} was found")
            found = finder.find_best_candidate(name, SpecifierSet(f"=={version}")).best_candidate
            if found is None:
                raise LookupError(f"{entry}: the package index has other versions only")
            print(Downloader(session, "off")(found.link, folder)[0], flush=True)


if __name__ == "__main__":
    try:
        fetch(sys.argv[1], sys.argv[2:])
    except OSError as error:
        print(error, file=sys.stderr)
        sys.exit(UNREACHABLE)
