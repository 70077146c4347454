"""What a compiled program's text says of loops, types and calls."""

import pytest

from rope_jax.experiment.hlo_text import array_bytes, elements, executions

# A loop of 6 rounds that calls a loop of 4 rounds, written as a TPU's compiler does:
# the bounds are constants of the conditions, or come in by the loop's first values.
NESTED = """
HloModule jit_step, is_scheduled=true

%inner_condition (p: (s32[], s32[])) -> pred[] {
  %p = (s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%p), index=0
  %bound = s32[]{:T(128)} get-tuple-element(%p), index=1
  ROOT %lt = pred[]{:T(512)} compare(%counter, %bound), direction=LT
}

%inner (q: (s32[], s32[])) -> (s32[], s32[]) {
  %q = (s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  ROOT %mark = (s32[], s32[]) custom-call(%q), custom_call_target="X"
}

%outer_condition (r: (s32[])) -> pred[] {
  %six = s32[]{:T(128)} constant(6)
  %r = (s32[]{:T(128)}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%r), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%count, %six), direction=LT
}

%outer_body (s: (s32[])) -> (s32[]) {
  %one = s32[]{:T(128)} constant(1)
  %copied = s32[]{:T(128)} copy(%one)
  %five = s32[]{:T(128)} constant(5)
  %start = (s32[]{:T(128)}, s32[]{:T(128)}) tuple(%copied, %five)
  ROOT %loop = (s32[], s32[]) while(%start), condition=%inner_condition, body=%inner
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %zero = s32[]{:T(128)} constant(0)
  %begin = (s32[]{:T(128)}) tuple(%zero)
  ROOT %outer = (s32[]) while(%begin), condition=%outer_condition, body=%outer_body
}
"""


def _runs(text, opcode):
    (found,) = [x for x in executions(text) if x.instruction.opcode == opcode]
    return found.times, found.exact


def test_the_trip_counts_of_nested_loops_multiply():
    # The inner loop counts from 1 to 5, the outer one from 0 to 6.
    assert _runs(NESTED, "custom-call") == (24, True)


def test_a_trip_count_that_the_compiler_wrote_down_is_taken():
    text = NESTED.replace(
        "body=%outer_body",
        'body=%outer_body, backend_config={"known_trip_count":{"n":"2"}}',
    )
    assert _runs(text, "custom-call") == (8, True)


def test_a_loop_without_a_bound_counts_once_and_says_so():
    text = NESTED.replace("direction=LT", "direction=NE", 1)
    assert _runs(text, "custom-call") == (6, False)


@pytest.mark.parametrize(
    "kind, size",
    [
        ("f32[]{:T(128)}", 4),
        ("bf16[8,2,128,64]{3,2,1,0:T(8,128)(2,1)S(1)}", 262144),
        ("(f32[4,16]{1,0}, /*index=5*/pred[3]{0}, s4[6]{0}, token[])", 262),
        ("f8e4m3fn[2,3]", 6),
        ("c64[5]", 40),
    ],
)
def test_bytes_of_types(kind, size):
    assert array_bytes(kind) == size


def test_elements_of_a_tuple_keep_their_layouts():
    kind = "((f32[2]{0:T(128)}, f32[4]), bf16[8,2]{1,0:T(8,128)(2,1)}, u32[]{:S(2)})"
    assert elements(kind) == [
        "(f32[2]{0:T(128)}, f32[4])",
        "bf16[8,2]{1,0:T(8,128)(2,1)}",
        "u32[]{:S(2)}",
    ]


def test_text_that_is_no_program_raises():
    with pytest.raises(ValueError, match="ENTRY computation"):
        list(executions("module @jit_f {}"))
