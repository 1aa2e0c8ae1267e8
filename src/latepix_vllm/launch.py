"""Runs vLLM's own command line, and ends with whoever started it: `python -m latepix_vllm.launch serve MODEL ...`.

With LATEPIX_SUPERVISED=1, standard input is a pipe that the launcher holds; when it closes, vLLM and its workers end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def _end_with_parent() -> None:
    # Taken out, so that vLLM's own processes do not watch an input that is not theirs.
    if os.environ.pop("LATEPIX_SUPERVISED", None) != "1":
        return

    def watch() -> None:
        while os.read(0, 1024):
            pass
        if os.getpgrp() == os.getpid():
            # The leader of a group takes its workers along.
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> None:
    """Start vLLM."""
    _end_with_parent()
    sys.argv[0] = "vllm"
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
