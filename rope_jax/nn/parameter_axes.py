"""Which axes of a mesh split each parameter of a decoder, by the parameter's name."""

# Parameter path, by its last names -> the mesh axes of its last dimensions.
_RULES: dict[tuple[str, ...], tuple[str | None, ...]] = {
    ("blocks", "encoding", "params", "embedding"): (None, None),  # CoPE's, of no head
    ("encoding", "params", "embedding"): (None, "tensor"),  # T5's
    ("encoding", "params", "kernel"): ("fsdp", "tensor"),
    ("encoding", "params", "bias"): ("tensor",),
    ("encoding", "params", "kernel_out"): (None, "tensor"),
    ("encoding", "params", "bias_out"): ("tensor",),
    ("encoding", "params", "r1"): ("tensor",),
    ("encoding", "params", "r2"): ("tensor",),
    ("encoding", "phase"): ("tensor", None),
    ("embedding",): (None, "fsdp"),
    ("head",): ("fsdp", "tensor"),
    ("encoding", "table"): (None, "fsdp"),
    ("query", "kernel"): ("fsdp", "tensor", None),
    ("key", "kernel"): ("fsdp", "tensor", None),
    ("value", "kernel"): ("fsdp", "tensor", None),
    ("out", "kernel"): ("tensor", None, "fsdp"),
    ("gate", "kernel"): ("fsdp", "tensor"),
    ("up", "kernel"): ("fsdp", "tensor"),
    ("down", "kernel"): ("tensor", "fsdp"),
    ("scale",): (None,),
}


def axes_of(names: tuple[str, ...], ndim: int) -> tuple[str | None, ...]:
    """The mesh axis that splits each dimension of a parameter; None for none.

    Args:
      names: the path of the parameter in the model, or of an optimizer's slot, which
        ends in it. The layers lie at "blocks".
      ndim: of the parameter. Leading dimensions that the table does not know, as of
        layers that are stacked, are not split.

    Raises:
      ValueError: no rule knows the parameter.

    Example:
      >>> axes_of(("blocks", "attention", "query", "kernel"), 4)
      (None, 'fsdp', 'tensor', None)
      >>> axes_of(("blocks", "attention", "query", "kernel"), 3)
      ('fsdp', 'tensor', None)
    """
    for suffix, axes in _RULES.items():
        if names[-len(suffix) :] == suffix:
            return (None,) * (ndim - len(axes)) + axes
    if "encoding" in names:  # a few numbers for all heads: on every device
        return (None,) * ndim
    raise ValueError(f"no sharding rule for the parameter {'.'.join(names)}")
