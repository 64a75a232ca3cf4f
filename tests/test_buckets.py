"""Which tensors are compressed, seen as one, and travel together."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from hvdcomp.buckets import Bucket, Layout, Spec, is_excluded, natural_key
from hvdcomp.compressors import FP16, Compressor, NoCompression, PowerSGD, TopK

MIB = 2**20


def spec(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Spec:
    return Spec(name, torch.Size(shape), dtype, torch.device("cpu"))


def names(buckets: list[Bucket]) -> list[list[str]]:
    return [[member.name for member in bucket.members] for bucket in buckets]


def units(buckets: list[Bucket]) -> list[list[list[str]]]:
    return [[[member.name for member in part.members] for part in bucket.parts] for bucket in buckets]


def compressed(buckets: list[Bucket]) -> set[str]:
    return {member.name for bucket in buckets for part in bucket.parts if part.compressed for member in part.members}


# -- order


def test_names_are_in_natural_order() -> None:
    given = ["layer.10.w", "layer.2.w", "layer.2.b", "layer.1.w", "Layer.3", "a", "layer", "10", "9"]
    assert sorted(given, key=natural_key) == [
        "9", "10", "Layer.3", "a", "layer", "layer.1.w", "layer.2.b", "layer.2.w", "layer.10.w",
    ]  # fmt: skip


def test_different_names_never_tie() -> None:
    tricky = [
        "a1",
        "a01",
        "a001",
        "1",
        "01",
        "a",
        "",
        "a1b",
        "a01b",
        "a1b1",
        "a1b01",
        "²",
        "1²",
        "٣",
        "3",
        "a.1",
        "a.01.b",
    ]
    assert len({natural_key(name) for name in tricky}) == len(tricky)
    for left, right in itertools.combinations(tricky, 2):
        assert (natural_key(left) < natural_key(right)) != (natural_key(right) < natural_key(left))


@pytest.mark.parametrize("granularity", ["tensor", "bucket", "model"])
def test_buckets_do_not_depend_on_the_order_of_the_tensors(granularity: str) -> None:
    """A set's order differs between ranks."""
    specs = [
        spec(f"l{'0' * (i % 2)}{i // 2}.w", 100, i + 1, dtype=[torch.float32, torch.float16][i % 3 % 2])
        for i in range(20)
    ]
    layout = Layout(TopK(), granularity, bucket_mb=0.01)
    groups = [[s.name for s in specs[5:9]], [s.name for s in specs[:4]]]

    def described(order: list[Spec]) -> list[object]:
        made = [layout.buckets(order), layout.buckets(order, groups=[list(reversed(g)) for g in groups])]
        return [[(b.index, [(p.unit.name, p.unit.shape, p.members) for p in b.parts]) for b in bs] for bs in made]

    first = described(specs)
    for seed in range(5):
        assert described(random.Random(seed).sample(specs, len(specs))) == first


# -- sizes


def test_buckets_fill_up_in_name_order() -> None:
    specs = [spec(name, MIB // 8) for name in "abcde"]  # half a MiB each
    assert names(Layout(TopK(), bucket_mb=1, exclude=()).buckets(specs)) == [["a", "b"], ["c", "d"], ["e"]]
    assert names(Layout(TopK(), bucket_mb=0.4, exclude=()).buckets(specs)) == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert names(Layout(TopK(), bucket_mb=99, exclude=()).buckets(specs)) == [list("abcde")]


def test_a_buckets_size_is_in_bytes_of_gradients() -> None:
    halves = [spec(name, MIB // 8, dtype=torch.float16) for name in "abcd"]
    assert names(Layout(TopK(), bucket_mb=1, exclude=()).buckets(halves)) == [list("abcd")]


def test_a_tensor_larger_than_a_bucket_has_its_own() -> None:
    specs = [spec("a", 4), spec("b", MIB), spec("c", 4)]
    assert names(Layout(TopK(), bucket_mb=1, exclude=()).buckets(specs)) == [["a"], ["b"], ["c"]]


def test_no_tensors_no_buckets() -> None:
    assert Layout(TopK()).buckets([]) == []


def test_numbers_go_on_from_the_first() -> None:
    made = Layout(TopK(), bucket_mb=1e-6).buckets([spec("a", 4), spec("b", 4)], first_index=7)
    assert [bucket.index for bucket in made] == [7, 8]


@pytest.mark.parametrize("bucket_mb", [0, -1, float("nan")])
def test_a_size_that_is_none_is_refused(bucket_mb: float) -> None:
    with pytest.raises(ValueError, match=r"bucket_mb must be >= 1e-09, got .*\(MiB"):
        Layout(TopK(), bucket_mb=bucket_mb)


# -- units


def test_each_granularity() -> None:
    specs = [spec(name, MIB // 8) for name in "abc"]
    layouts = {g: Layout(TopK(), g, bucket_mb=1, exclude=()) for g in ("tensor", "bucket", "model")}
    assert units(layouts["tensor"].buckets(specs)) == [[["a"], ["b"]], [["c"]]]
    assert units(layouts["bucket"].buckets(specs)) == [[["a", "b"]], [["c"]]]
    assert units(layouts["model"].buckets(specs)) == [[["a", "b", "c"]]]


def test_a_unit_of_several_tensors_is_flat_with_one_after_the_other() -> None:
    (bucket,) = Layout(TopK(), "model", exclude=()).buckets([spec("b", 2, 3), spec("a", 4), spec("c")])
    (part,) = bucket.parts
    assert part.unit.shape == (4 + 6 + 1,)
    assert part.offsets == [0, 4, 10]
    assert part.feedback is not None
    assert part.feedback.residual.shape == (11,)


@pytest.mark.parametrize("granularity", ["bucket", "model"])
def test_types_are_not_mixed_within_a_unit(granularity: str) -> None:
    types = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    specs = [spec(f"{i}{j}", 3, dtype=dtype) for i, dtype in enumerate(types) for j in range(2)]
    (bucket,) = Layout(TopK(), granularity, exclude=()).buckets(specs)
    assert [{m.dtype for m in part.members} for part in bucket.parts] == [{dtype} for dtype in types]
    residuals = [part.feedback.residual.dtype for part in bucket.parts if part.feedback is not None]
    assert residuals == [torch.float32] * 3 + [torch.float64]


def test_excluded_tensors_stay_out_of_a_unit() -> None:
    (bucket,) = Layout(TopK(), "model").buckets([spec("a.w", 4, 4), spec("b.bias", 4), spec("c.w", 4, 4)])
    assert sorted(units([bucket])[0]) == [["a.w", "c.w"], ["b.bias"]]


@pytest.mark.parametrize("granularity", ["layer", "", "Tensor", None])
def test_an_unknown_granularity_is_refused(granularity: str) -> None:
    with pytest.raises(ValueError, match="granularity must be one of tensor, bucket, model, got"):
        Layout(TopK(), granularity)


@pytest.mark.parametrize("granularity", ["bucket", "model"])
def test_powersgd_needs_matrices(granularity: str) -> None:
    with pytest.raises(
        ValueError, match=f"powersgd works on matrices, so it needs granularity='tensor', got '{granularity}'"
    ):
        Layout(PowerSGD(), granularity)


def test_only_compressed_units_keep_a_residual() -> None:
    for compressor, keeps in (
        (TopK(), True),
        (TopK(error_feedback=False), False),
        (FP16(), False),
        (NoCompression(), False),
    ):
        made = Layout(compressor, exclude=("1d",)).buckets(
            [spec("w", 2, 2), spec("b", 2), spec("e", 5, 2)], sparse=["e"]
        )
        parts = {member.name: part for bucket in made for part in bucket.parts for member in part.members}
        assert (parts["w"].feedback is not None) == keeps
        assert parts["b"].feedback is None
        assert parts["e"].feedback is None
        assert parts["e"].sparse


# -- groups


def test_groups_are_buckets_and_each_other_tensor_has_its_own() -> None:
    specs = [spec(name, 4) for name in "abcdef"]
    made = Layout(TopK()).buckets(specs, groups=[["e", "b"], ["d"], ["frozen"]])
    assert names(made) == [["b", "e"], ["d"], ["a"], ["c"], ["f"]]
    assert [bucket.index for bucket in made] == list(range(5))


def test_groups_go_before_sizes() -> None:
    specs = [spec(name, MIB) for name in "ab"]
    assert names(Layout(TopK(), bucket_mb=0.1).buckets(specs, groups=[["a", "b"]])) == [["a", "b"]]


@pytest.mark.parametrize("compressor", [TopK(), FP16(), NoCompression()], ids=lambda c: c.name)
@pytest.mark.parametrize("granularity", ["tensor", "bucket", "model"])
def test_every_tensor_is_in_one_bucket(compressor: Compressor, granularity: str) -> None:
    specs = [spec(f"l{i}", *([3] * (i % 3))) for i in range(30)]
    for groups in (None, [["l1", "l7"], ["l3"]]):
        made = Layout(compressor, granularity, bucket_mb=5e-5).buckets(specs, groups=groups, sparse=["l2"])
        members = [name for bucket in names(made) for name in bucket]
        assert sorted(members) == sorted(s.name for s in specs)


# -- exclusion

MODEL = [
    spec("conv.weight", 4, 3, 3, 3),
    spec("conv.bias", 4),
    spec("fc.weight", 5, 4),
    spec("scale"),
    spec("bn.weight", 4),
]


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ((), {"conv.weight", "conv.bias", "fc.weight", "scale", "bn.weight"}),
        (("1d",), {"conv.weight", "fc.weight"}),
        (("*.bias",), {"conv.weight", "fc.weight", "scale", "bn.weight"}),
        (("conv.*", "1d"), {"fc.weight"}),
        (("FC.weight",), {"conv.weight", "conv.bias", "fc.weight", "scale", "bn.weight"}),
        (("[bc]*",), {"fc.weight", "scale"}),
        (("*",), set()),
        (None, {"conv.weight", "fc.weight"}),
        (("<2", "fc.*"), {"conv.weight", "conv.bias", "bn.weight"}),
        (("<999999",), set()),
    ],
)
def test_rules_of_exclusion(exclude: tuple[str, ...] | None, left: set[str]) -> None:
    assert compressed(Layout(TopK(), exclude=exclude).buckets(MODEL)) == left


def test_an_exclusion_that_looks_like_a_size_must_be_one() -> None:
    with pytest.raises(ValueError, match="'<abc', which is no size"):
        Layout(TopK(), exclude=("<abc",))


def test_the_word_1d_means_fewer_than_two_dimensions() -> None:
    assert is_excluded(spec("a"), ["1d"])
    assert is_excluded(spec("a", 3), ["1d"])
    assert not is_excluded(spec("a", 3, 1), ["1d"])
    assert not is_excluded(spec("1d", 3, 1), ["1d"])


def test_a_size_means_fewer_elements() -> None:
    assert [is_excluded(spec("a", n), ["<10"]) for n in (9, 10, 11)] == [True, False, False]
    assert is_excluded(spec("a"), ["< 2"])


def test_a_string_of_rules_is_refused() -> None:
    with pytest.raises(ValueError, match=r"exclude must be a sequence of name globs.*got the string '\*.bias'"):
        Layout(TopK(), exclude="*.bias")
