"""What the commands share: a clear word for a wrong flag, before any work."""

import dataclasses
import difflib
import os
import sys
import typing

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from rope_jax.experiment import compilation_cache, distributed
from rope_jax.experiment.config import Config
from rope_jax.experiment.errors import RunError


def run(main) -> None:
    """Run `main(argv)` under absl; a wrong flag or value exits with one line.

    ValueError, OSError and RunError carry messages written for the user, so they are
    printed without a traceback (ROPE_JAX_TRACEBACK=1 shows it), and so is a lack of
    memory; anything else is a fault and keeps it. The libraries' own log lines below
    warnings are off unless --verbosity asks for them. One process of several ends in
    a way that the others notice. What is compiled is kept for the next run (see
    `compilation_cache`).
    """

    def guarded(argv):
        if len(argv) > 1:
            _fail(f"unexpected argument {argv[1]!r}; options are written --name=value")
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)
        _check_config_file()
        compilation_cache.enable()
        try:
            main(argv)
        except BaseException as error:
            message = _message(error)
            if jax.distributed.is_initialized():
                distributed.fail(error, message)
            if message is None:
                raise
            _fail(message)
        distributed.finish()

    app.run(guarded)


def define_config(default: str) -> flags.FlagHolder:
    """Define --config, and stop here if an override names no field.

    The flag reads its overrides while it is being defined, and raises an error of
    its own that does not say which fields there are.
    """
    problem = _wrong_override(sys.argv[1:])
    if problem:
        _fail(problem)
    sys.argv[1:] = map(_quoted, sys.argv[1:])
    return config_flags.DEFINE_config_file(
        "config", default, "A file of configs/, with :ARGUMENT if it takes one."
    )


def _message(error: BaseException) -> str | None:
    """What to say of an error in one line; None for a fault."""
    if isinstance(error, ValueError | OSError | RunError):
        return None if os.environ.get("ROPE_JAX_TRACEBACK") else str(error)
    memory = isinstance(error, jax.errors.JaxRuntimeError)
    if memory and "RESOURCE_EXHAUSTED" in str(error):
        return f"not enough memory for lengths or batches of this size: {error}"
    return None


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _check_config_file() -> None:
    """Stop where --config names no file: the flag says so only where it is used."""
    if "config" in flags.FLAGS:
        given = config_flags.get_config_filename(flags.FLAGS["config"])
        if not os.path.isfile(given.split(":", 1)[0]):  # an argument may follow
            _fail(f"--config={given}: there is no such file")


def _wrong_override(arguments: list[str]) -> str | None:
    """The first `--config.a.b` that is no field, with the nearest valid ones."""
    for argument in arguments:
        flag = argument.lstrip("-").partition("=")[0]
        if not argument.startswith("-"):
            continue
        if not flag.startswith("config."):
            near = difflib.get_close_matches(flag, _leaves(Config), cutoff=0.8)
            if near and flag not in flags.FLAGS:
                found = " or ".join(
                    f"--config.{_leaves(Config)[name]}" for name in near
                )
                return f"there is no flag --{flag}; did you mean {found}?"
            continue
        kind = Config
        for name in flag.split(".")[1:]:
            fields = _fields(kind)
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                return f"--{flag}: no field {name!r}; valid: {', '.join(fields)}{hint}"
            kind = fields[name]
        if dataclasses.is_dataclass(kind):
            return f"--{flag} is a group; set one of {', '.join(_fields(kind))}"
    return None


def _quoted(argument: str) -> str:
    """An override of a list of texts, in the quotes that the flag's parser needs.

    It reads what has a comma as Python, and `linear:4,yarn:4` is none.
    """
    flag, _, text = argument.partition("=")
    kind = Config
    for name in flag.lstrip("-").split(".")[1:]:
        kind = _fields(kind).get(name)
    if kind != tuple[str, ...] or text[:1] in ("", "'", '"', "(", "["):
        return argument
    return f"{flag}={text!r}"


def _leaves(kind, path: str = "") -> dict[str, str]:
    """The last name of every field of a config, and where it stands."""
    found = {}
    for name, field in _fields(kind).items():
        inner = _leaves(field, f"{path}{name}.")
        found |= inner or {name: path + name}
    return found


def _fields(kind) -> dict[str, typing.Any]:
    if not dataclasses.is_dataclass(kind):
        return {}
    return {f.name: f.type for f in dataclasses.fields(kind)}
