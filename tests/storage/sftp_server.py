"""Runs an SFTP server over a folder with asyncssh:  python sftp_server.py PORT FOLDER PASSWORD"""

import asyncio
import sys

import asyncssh


class _PasswordServer(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        return True

    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return password == sys.argv[3]


async def serve() -> None:
    """Serves until the process is killed."""
    await asyncssh.listen(
        "127.0.0.1",
        int(sys.argv[1]),
        server_factory=_PasswordServer,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=sys.argv[2].encode()),
        allow_scp=False,
    )
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())
