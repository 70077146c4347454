"""Runs the commands as a user would, without importing everything each time.

Started as a process of its own, which imports what the commands import and then
forks once for each line of JSON that it reads: a script or the name of a module, its
arguments and a folder.
Nothing of jax is started before the fork, so every child is as good as new.
"""

import json
import os
import pathlib
import runpy
import sys
import tempfile
import traceback


def main():
    """Serve until the input ends."""
    import rope_jax.experiment.sweep  # noqa: F401  the slow imports

    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile("w+") as out:
            child = os.fork()
            if child == 0:
                _run(request, out)
            _, status = os.waitpid(child, 0)
            out.seek(0)
            answer = {"code": os.waitstatus_to_exitcode(status), "output": out.read()}
        print(json.dumps(answer), flush=True)


def _run(request, out):
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    os.chdir(request["folder"])
    sys.argv = [request["script"], *request["arguments"]]
    code = 0
    try:
        if request["script"].endswith(".py"):
            sys.path.insert(0, str(pathlib.Path(request["script"]).parent))
            runpy.run_path(request["script"], run_name="__main__")
        else:
            runpy.run_module(request["script"], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
