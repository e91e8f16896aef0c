"""One build process: the parent's end of it, and the loop that it runs.

A worker is a fresh interpreter (`python -m tilewright.generator.build_worker`) in a session of its own that reads one
request a line and answers one line. Not multiprocessing: that would run the caller's main module once more.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from tilewright.generator.render import Rendered
from tilewright.generator.variant import Kernel

KILL_S = 5.0


class WorkerDied(Exception):
    """The worker ended without an answer."""


class Worker:
    """The parent's end of one build process."""

    def __init__(self) -> None:
        # The kernels are named by the path of this package, wherever the parent found it.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            # load_inline asks whether there is a GPU; through NVML that opens no CUDA context.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by kill()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tilewright.generator.build_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One request and its answer. Raises `TimeoutError` and `WorkerDied`; the worker is of no use after either."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the end of its output says so below
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        answer = b""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                chunk = os.read(self.process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise WorkerDied(self._last_words())
                answer += chunk
        values: dict[str, Any] = json.loads(answer)
        return values

    def _last_words(self) -> str:
        code = self.process.wait()
        if code < 0:
            return f"the build process was killed by {signal.Signals(-code).name}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"the build process ended with code {code}: {lines[-1] if lines else 'it said nothing'}"

    def kill(self) -> None:
        """End the worker and every compiler below it, and close its pipes, for which nobody may be waiting any more."""
        self.end()
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def end(self) -> None:
        """End the worker and every compiler below it; who waits for its answer then gets `WorkerDied`."""
        # ninja puts each compiler in a process group of its own, so the worker's group is not enough; all of them
        # stay in the session that the worker leads.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_S
        # Once more until none is left: one may have been starting another.
        while (members := session_members(self.process.pid)) and time.monotonic() < deadline:
            for pid in members:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        self.process.wait()


def session_members(session: int) -> list[int]:
    """The living processes of a session, by /proc; empty where there is no /proc."""
    members = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        # pid (name, which may hold anything) state parent group session ...
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if len(fields) > 3 and int(fields[3]) == session and fields[0] not in "ZX":
            members.append(int(entry.parent.name))
    return members


def request_for(rendered: Rendered) -> dict[str, Any]:
    """What to ask a worker for this kernel."""
    return {
        "kernel": rendered.kernel.to_dict(),
        "sources": rendered.sources,
        "language": rendered.language,
        "digest": rendered.digest,
    }


def serve() -> None:
    """The worker's loop: build each kernel that comes in on standard input, until it ends."""
    import logging

    from torch.utils import cpp_extension  # noqa: F401  slow to import, so before the first request is timed

    from tilewright.generator.build import build

    # PyTorch's remarks about this machine would be repeated once a worker.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not be read as an answer
    for line in sys.stdin:
        values = json.loads(line)
        started = time.perf_counter()
        try:
            kernel = Kernel.from_dict(values["kernel"])
            rendered = Rendered(kernel, values["sources"], values["language"], values["digest"])
            answer: dict[str, Any] = {"artifact": str(build(rendered))}
        except Exception as error:
            answer = {
                "error": type(error).__name__,
                "message": str(error),
                "log": getattr(error, "log", ""),
                "source_path": str(getattr(error, "source_path", None) or ""),
            }
        answer["compile_s"] = time.perf_counter() - started
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
