"""Golden numbers made by other libraries; `make_golden.py` regenerates them.

Each archive is a flat map of arrays, read with `load(name)` or, in the tests of
this folder, with the fixture `golden`. Another test reads the same numbers with
`numpy.load("tests/golden/NAME.npz")`. Activations are [B, T, N, H], scores and
biases [B, N, T, S], as in this project; where the peer applies a causal mask its
entries above the diagonal are stored as zero. Positions count from 0 unless said.

`x_transformers.npz` (layout "interleaved"):
- `xpos/query`, `/key`, `/rotated_query`, `/rotated_key`, `/scale` [T, H/2],
  `/scores`: scale_base 512, T 48, centre T // 2. `xpos_base64/...`: base 64, T 33.
- `cope/query`, `/logits` (already scaled, unmasked), `/embedding` [max_pos, H],
  `/bias`: max_pos 8, T 12. `cope_long/...`: max_pos 16, T 40. Gates see only the
  keys at or before the query; `bias` is added to the logits.
- `fox/x` [B, T, D], `/kernel` [D, N], `/bias_param` [N], `/log_gates` [B, N, T]
  (before the cumulative sum), `/bias`: added to the logits.
- `pope/query`, `/key`, `/phase` [N, H] (added to the angle of keys), `/inv_freq`
  [H], `/polar_query`, `/polar_key` [B, T, N, 2H], all cosines before all sines,
  `/scores` (unscaled).
- `alibi/positions`, `/bias_6_heads` [N, T, S]: symmetric, six heads.
- `t5/relative_position` (key - query), `/bucket_causal`, `/bucket_bidirectional`:
  32 buckets, maximum distance 128.
- `sinusoid/embedding` [T, D], `/scale`: concatenated, all sines before all cosines,
  spacing of the paper, multiplied by `scale`.
- `ntk_factor4/inv_freq` [32]; `partial/...`, `partial_linear4/...`: the first 16 of
  48 channels turn.

`rotary_embedding_torch.npz` (layout "interleaved", T 24): `query`, `key`, and for
each of `default`, `linear2`, `ntk8`, `partial16`, `theta1e6`: `/rotated_query` and
`/rotated_key_offset7` (positions 7 to 30); `xpos/...` as above, scale_base 512;
`pixel/inv_freq` (in units of pi); `axial/x` [B, 4, 6, H], `/rotated`: 2-D axial,
16 channels per axis, rows first.

`configs.json`: the keys about size and rotation of published config.json files, as far
as they are public knowledge (the numbers hold for the configs as written here),
`grid/LAYOUT/TYPE/SHARE` for every rope type with a quarter and half of the head
turning, and a few tiny ones for the tests of the parser.

`transformers.npz`: `inputs/query`, `inputs/key` [1, T, 1, 512], of which each run takes
the first channels and positions; then for each `CONFIG/LAYER_TYPE/LENGTH`:
`/positions` [T] or, with M-RoPE, [3, T]; `/inv_freq`, `/attention_factor`;
`/float32/query`, `/float32/key`, `/bfloat16/query` (bits as uint16), rotated. The peer
takes the longest position + 1 as the length. Also `NAME/softmax_scale_factor` of
DeepSeek, `t5/...` as above, and `alibi/bloom_slopes`, `alibi/mpt_slopes` [129, 128]:
row N holds N slopes (`alibi/slopes` of x-transformers, the original recursion, too).

`layouts.json`: for each model type, which channels its rotation pairs, and the defaults
of its config class.
"""

import pathlib

import numpy as np
import pytest

collect_ignore = ["make_golden.py", "from_lucidrains.py", "from_transformers.py"]


def load(name):
    """The arrays of `NAME.npz` beside this file, as a dictionary."""
    with np.load(pathlib.Path(__file__).with_name(f"{name}.npz")) as archive:
        return {key: archive[key] for key in archive.files}


@pytest.fixture(scope="session")
def golden():
    """`golden(name)` reads one archive."""
    return load
