"""Regenerates the golden numbers with the real peer libraries.

    python tests/golden/make_golden.py

It needs `torch`, `transformers`, `x-transformers` and `rotary-embedding-torch`; the
tests that read the numbers need none of them. The numbers were made with torch
2.13, transformers 5.24.0, x-transformers 2.31.10 and rotary-embedding-torch 0.9.1
on a CPU, and each file repeats the versions it was made with under the key
`versions`. Nothing here computes a number itself: every stored array is an input
that the peer was given or an output that it returned.
"""

import importlib.metadata
import json
import pathlib
import platform
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
PEERS = ("torch", "transformers", "x-transformers", "rotary-embedding-torch")


def save(name, arrays):
    """Write one compressed archive with the versions of the peers in it."""
    versions = {peer: importlib.metadata.version(peer) for peer in PEERS}
    versions["python"] = platform.python_version()
    path = HERE / f"{name}.npz"
    np.savez_compressed(path, versions=np.array(json.dumps(versions)), **arrays)
    print(f"{path.name}: {len(arrays)} arrays, {path.stat().st_size:,} bytes")


def main():
    """Make every archive, or those named on the command line."""
    sys.path.insert(0, str(HERE))
    import from_lucidrains
    import from_transformers

    makers = {
        "x_transformers": from_lucidrains.x_transformers_arrays,
        "rotary_embedding_torch": from_lucidrains.rotary_embedding_torch_arrays,
        "transformers": from_transformers.transformers_arrays,
    }
    for name in sys.argv[1:] or makers:
        save(name, makers[name]())
    layouts = json.dumps(from_transformers.layouts(), indent=1, sort_keys=True)
    (HERE / "layouts.json").write_text(layouts + "\n")


if __name__ == "__main__":
    main()
