"""Flax NNX: the decoder and its table of positional encodings."""
