"""The keeper's process, a small one: it needs neither numpy nor the engine.

    python -m kvstow_service.node.survival.keeperprocess STATE_FOLDER KEEP_TIMEOUT_SECONDS [--daemon | --stay]

With --daemon it continues in the background. With --stay it lets go of everything instead of ending, and waits for the
next service: in a container of its own, ending would cause a restart.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

from kvstow.errors import KeeperError
from kvstow_service.node.survival import statefolder
from kvstow_service.node.survival.keeper import Keeper

PROCESS_NAME = "kvstow-keeper"
ALREADY_RUNNING = 3  # exit status


def main(arguments: list[str]) -> int:
    """Become the keeper of a state folder, or say why not."""
    try:
        folder, keep_timeout = Path(arguments[0]).absolute(), float(arguments[1])
        option = "".join(arguments[2:])
        if keep_timeout < 0 or option not in ("", "--daemon", "--stay"):
            raise ValueError
    except (IndexError, ValueError):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        lock = statefolder.try_lock(statefolder.require_state_folder(folder))
        if lock is None:
            print(f"the state folder {folder} has a keeper already", file=sys.stderr)
            return ALREADY_RUNNING
        listener = statefolder.listen(folder)
    except (KeeperError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    if option == "--daemon" and not _daemonize():
        return 0
    _run(Keeper(listener, keep_timeout, stays=option == "--stay"), folder)
    return 0


def _run(keeper: Keeper, folder: Path) -> None:
    with suppress(OSError):
        Path("/proc/self/comm").write_text(PROCESS_NAME)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as process 1 of a container, it would be ignored
    try:
        while keeper.step():
            pass
    finally:
        # The lock is held still, so the socket is this keeper's.
        (folder / statefolder.SOCKET).unlink(missing_ok=True)
        keeper.close()


def _daemonize() -> bool:
    """Continue in a child process that signals to the service's process group do not reach. Returns False in the
    parent."""
    if os.fork():
        return False
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.close(null)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
