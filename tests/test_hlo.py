"""Compiled programs, one written by hand and one made here: what is read in them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.estimate import estimate, module_of
from bert_jax.hlo import Program, arrays_in, bytes_of, groups_of
from bert_jax.preflight_text import told
from bert_jax.sharding import Axes, make_mesh
from bert_jax.tpu import CHIPS

# As the TPU compiler writes: a loop of three rounds with a gather that goes on beside a
# product (it stands in two fusions, under one number), a sort and a look-up.
TEXT = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%fused_start (p.0: bf16[4,64]) -> bf16[4,128] {
  %p.0 = bf16[4,64]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %all-gather.1 = bf16[4,128]{1,0:T(8,128)(2,1)} all-gather(%p.0), channel_id=7, \
replica_groups=[4,2]<=[4,2]T(1,0), dimensions={1}, use_global_device_ids=true
}

%fused_done (p.1: bf16[4,64]) -> bf16[4,128] {
  %p.1 = bf16[4,64]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[4,128]{1,0} all-gather(%p.1), channel_id=7, \
replica_groups=[4,2]<=[4,2]T(1,0), dimensions={1}, use_global_device_ids=true
}

%looked_up (p.2: f32[1000,8], p.3: s32[16]) -> f32[16,8] {
  %p.2 = f32[1000,8]{1,0} parameter(0)
  %p.3 = s32[16]{0} parameter(1)
  ROOT %gather.1 = f32[16,8]{1,0} gather(%p.2, %p.3), offset_dims={1}
}

%condition (c.0: (s32[], bf16[4,64])) -> pred[] {
  %three = s32[]{:T(128)} constant(3)
  %c.0 = (s32[]{:T(128)}, bf16[4,64]{1,0}) parameter(0)
  %c.1 = s32[]{:T(128)} get-tuple-element(%c.0), index=0
  ROOT %c.2 = pred[]{:T(512)} compare(%c.1, %three), direction=LT
}

%body (b.0: (s32[], bf16[4,64])) -> (s32[], bf16[4,64]) {
  %b.0 = (s32[]{:T(128)}, bf16[4,64]{1,0}) parameter(0)
  %b.1 = bf16[4,64]{1,0} get-tuple-element(%b.0), index=1
  %start = bf16[4,128]{1,0} fusion(%b.1), kind=kCustom, calls=%fused_start
  %work = bf16[4,64]{1,0} fusion(%b.1), kind=kOutput, calls=%other, \
metadata={op_name="jit(step)/transpose(jvp(Model))/main/stack/while/body/closed_call/\
Block/attention/q/dot_general"}, backend_config={"window_config":{"estimated_cycles":\
"500"}}
  %done = bf16[4,128]{1,0} fusion(%b.1), kind=kCustom, calls=%fused_done
  %b.2 = s32[]{:T(128)} get-tuple-element(%b.0), index=0
  ROOT %b.3 = (s32[]{:T(128)}, bf16[4,64]{1,0}) tuple(%b.2, %work)
}

%other (p.4: bf16[4,64]) -> bf16[4,64] {
  ROOT %p.4 = bf16[4,64]{1,0} parameter(0)
}

ENTRY %main (x: bf16[4,64], t: f32[1000,8], i: s32[16]) -> f32[16,8] {
  %x = bf16[4,64]{1,0:T(8,128)(2,1)} parameter(0)
  %t = f32[1000,8]{1,0:T(8,128)} parameter(1)
  %i = s32[16]{0:T(128)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  %state = (s32[]{:T(128)}, bf16[4,64]{1,0}) tuple(%zero, %x)
  %loop = (s32[]{:T(128)}, /*index=1*/bf16[4,64]{1,0}) while(%state), \
condition=%condition, body=%body
  %ahead = (f32[1000,8]{1,0:S(1)}, f32[1000,8]{1,0}, u32[]{:S(2)}) copy-start(%t)
  %there = f32[1000,8]{1,0:S(1)} copy-done(%ahead)
  %sorted = (s32[16]{0}, s32[16]{0}) sort(%i, %i), dimensions={0}, to_apply=%other
  %sum = (f32[10]{0}, bf16[30]{0}) all-reduce(%t, %x), channel_id=9, \
replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, to_apply=%other
  %step = f32[8]{0} fusion(%t), kind=kLoop, calls=%other, metadata={op_name="jit(step)/\
optimizer/add"}, backend_config={"window_config":{"estimated_cycles":"40"}}
  ROOT %found = f32[16,8]{1,0} fusion(%there, %i), kind=kCustom, calls=%looked_up, \
metadata={op_name="jit(step)/jvp(Model)/embed/jit(_take)/gather" stack_frame_id=3}
}
"""
# A Pallas kernel, in a loop as often as `times`, which says what it costs, or does not.
KERNEL = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (x: bf16[1024,512]) -> bf16[1024,512] {{
  %x = bf16[1024,512]{{1,0:T(8,128)(2,1)}} parameter(0)
  ROOT %call = bf16[1024,512]{{1,0}} custom-call(%x), custom_call_target=\
"tpu_custom_call", metadata={{op_name="jit(step)/jvp(Model)/main/stack/Block/attention/\
flash_forward/pallas_call"}}, backend_config={{"custom_call_config":{{"body":"TU"\
{cost}}}}}
}}
"""
COST = ',"cost_estimate":{{"flops":"{}","transcendentals":"7","bytes_accessed":"{}"}}'
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def test_collectives_of_a_text():
    gather, total = Program(TEXT).collectives()
    assert (gather.kind, gather.times, gather.bytes) == ("all-gather", 3, 4 * 128 * 2)
    assert gather.groups == ((0, 2), (4, 6), (1, 3), (5, 7))
    assert gather.axes(MESH) == ("fsdp",)
    assert (total.kind, total.times, total.bytes) == ("all-reduce", 1, 10 * 4 + 30 * 2)
    assert total.axes(MESH) == ("data", "fsdp")
    # Half of a gathered array comes from elsewhere; a sum goes round the ring twice.
    assert gather.sent == 4 * 64 * 2
    assert total.sent == 2 * 100 * 3 / 4


def test_estimate_of_a_text():
    chip = CHIPS["v5e"]
    found = estimate(Program(TEXT), chip, MESH)
    assert found.cycles == 3 * 500 + 40
    assert found.seconds == pytest.approx(1540 / 1.503e9, rel=1e-3)
    names = {one.name: (one.forward, one.backward) for one in found.modules}
    assert names == {"layers/attention/q": (0, 1500), "optimizer": (40, 0)}
    assert list(found.modelled) == ["collectives", "gather", "sort"]
    sent = 3 * 4 * 64 * 2 + 150
    moved = {"gather": 2 * 16 * 8 * 4, "sort": 4 * 16 * 4}
    expected = {kind: size / chip.hbm_bandwidth for kind, size in moved.items()}
    expected["collectives"] = sent / chip.link_bandwidth
    assert found.modelled == pytest.approx(expected)
    assert found.ahead == pytest.approx(1000 * 8 * 4 / chip.hbm_bandwidth, rel=1e-3)


# As the TPU compiler writes for one of two slices of four chips: a sum within the
# slice, and what goes through the host to be summed with that of the other.
HANDLER = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
SLICE = f"""\
HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[64,128]) -> f32[64,128] {{
  %x = f32[64,128]{{1,0:T(8,128)}} parameter(0)
  %sum = f32[64,128]{{1,0:T(8,128)}} all-reduce(%x), channel_id=1, \
replica_groups={{{{0,2}},{{1,3}}}}, use_global_device_ids=true, to_apply=%other
  %first = token[] after-all()
  %send = (f32[64,128]{{1,0:T(8,128)}}, u32[], token[]) send(%sum, %first), \
channel_id=5, is_host_transfer=true, frontend_attributes={{{HANDLER}}}
  %recv = (f32[64,128]{{1,0:T(8,128)}}, u32[], token[]) recv(%first), channel_id=4, \
is_host_transfer=true, frontend_attributes={{{HANDLER}}}
  %sent = token[] send-done(%send), channel_id=5, is_host_transfer=true
  %there = (f32[64,128]{{1,0:T(8,128)}}, token[]) recv-done(%recv), channel_id=4
  ROOT %all = f32[64,128]{{1,0:T(8,128)}} get-tuple-element(%there), index=0
}}
"""


def test_one_of_two_slices():
    """Groups number the chips of a slice; between slices there are bytes alone."""
    mesh, size = {"data": 4, "fsdp": 2, "tensor": 1}, 64 * 128 * 4
    chip = CHIPS["v5e"]
    found = estimate(Program(SLICE), chip, mesh)
    inside, between = found.collectives
    assert (inside.kind, inside.axes, inside.sent) == ("all-reduce", ("data",), size)
    assert (between.kind, between.axes) == ("between slices", ("data",))
    assert (between.count, between.bytes, between.sent) == (1, size, size)
    assert between.seconds is None
    assert found.modelled == {"collectives": size / chip.link_bandwidth}
    lines = told(found)
    said = " ".join(lines[-2].split())
    assert said == "between slices data 1 0.033 not modelled"
    assert "its time is in no sum" in lines[-1]


@pytest.mark.parametrize(
    ("cost", "kind", "seconds"),
    [
        # 197 TFLOP/s and 819 GB/s: as long as what takes longer.
        (COST.format(197 * 10**10, 819 * 10**5), "flash_forward", 0.01),
        (COST.format(197 * 10**8, 819 * 10**7), "flash_forward", 0.01),
        # Nothing is said: it reads and writes a megabyte.
        ("", "custom-call", 2 * 2**20 / 819e9),
    ],
)
def test_kernels_are_modelled(cost: str, kind: str, seconds: float):
    found = estimate(Program(KERNEL.format(cost=cost)), CHIPS["v5e"], MESH)
    assert found.cycles == 0
    assert found.modelled == pytest.approx({"collectives": 0, kind: seconds})


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[4], x", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, x", ((0, 1, 2, 3),)),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}, x",
            ((0, 2), (1, 3)),
        ),
        ("replica_groups=mesh['a'=4] {'a':(2)2}, x", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=4] {'a':(1)2}, x", ((0, 2), (1, 3))),
        ("replica_groups={}, x", ((0, 1, 2, 3),)),
        ("source_target_pairs={{0,1},{1,0}}, x", ((0, 1), (1, 0))),
    ],
)
def test_groups(text, groups):
    assert groups_of(text, 4) == groups


def test_shapes():
    shape = "(bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/f32[], pred[3]{0})"
    assert arrays_in(shape) == [("bf16", (8, 128)), ("f32", ()), ("pred", (3,))]
    assert bytes_of(shape) == 8 * 128 * 2 + 4 + 3


@pytest.mark.parametrize(
    ("operation", "module"),
    [
        ("jit(train_step)/jvp(Model)/main/lm/dense/dot_general", ("lm/dense", False)),
        (
            "jit(train_step)/transpose(jvp(Model))/main/stack/Block/attention/"
            "bhqs,bshk->bqhk/dot_general",
            ("layers/attention", True),
        ),
        (
            "jit(s)/jvp(Model)/generator/stack/Block/ffn/mul",
            ("generator/layers/ffn", 0),
        ),
        ("jit(train_step)/jvp()/reduce_max", ("loss", False)),
        ("jit(train_step)/optimizer/add", ("optimizer", False)),
        ("jit(train_step)/corrupt/vmap(jit(argsort))/sort", ("corrupt", False)),
        ("jit(train_step)/reduce_sum", ("the rest of the step", False)),
        ("convert.64", ("made by the compiler", False)),
    ],
)
def test_modules(operation, module):
    assert module_of(operation) == module


def test_a_program_of_this_machine():
    """What XLA itself writes here: sums over one axis, in a loop of five rounds."""
    mesh = make_mesh(Axes(data=2, fsdp=2, tensor=2))

    def step(x, w):
        def once(x, _):
            y = x @ w  # [8, 32], split in rows; the sum over `tensor` is told
            there = NamedSharding(mesh, P(("data", "fsdp")))
            return jax.lax.with_sharding_constraint(jnp.tanh(y), there), None

        x, _ = jax.lax.scan(once, x, None, length=5)
        return x

    def at(*shape, spec):
        where = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)

    arguments = at(8, 32, spec=P(("data", "fsdp"))), at(32, 32, spec=P("tensor"))
    text = jax.jit(step).lower(*arguments).compile().as_text()
    found = [
        (one.kind, one.axes(dict(mesh.shape)), one.times, one.bytes)
        for one in Program(text).collectives()
    ]
    assert found == [("all-reduce", ("tensor",), 5, 2 * 32 * 4)]
