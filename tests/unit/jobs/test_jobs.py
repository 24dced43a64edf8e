"""The shipped jobs: data as a pure function of the step, settings refused by name, models that learn."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from tallystick.errors import InvalidInput
from tallystick.execution.job import SHIPPED, Job, find_source
from tallystick.jobs import digits, gpt2, resnet50, text

TINY: Mapping[str, Mapping[str, str]] = {
    "digits": {"steps": "40", "width": "4"},
    "text": {"steps": "40", "width": "32", "layers": "1", "heads": "2", "block": "32"},
    "resnet50": {"steps": "40", "width": "2", "blocks": "1,1,1,1", "batch": "4"},
    "gpt2": {"layers": "1", "width": "32", "heads": "2", "batch": "2", "block": "8", "positions": "16"},
}

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the extra tallystick[transformers] is missing"
)
every_job = pytest.mark.parametrize(
    "name", ["digits", "text", "resnet50", pytest.param("gpt2", marks=needs_transformers)]
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small wait for their threads longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def built(name: str, **settings: str) -> Job:
    return find_source(name).build({**TINY[name], **settings})


def tensors(batch: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return batch if isinstance(batch, tuple) else (batch,)


def same(first: Tensor | tuple[Tensor, ...], second: Tensor | tuple[Tensor, ...]) -> bool:
    return all(map(torch.equal, tensors(first), tensors(second)))


def size(job: Job) -> int:
    return sum(parameter.numel() for parameter in job.model.parameters())


def trained(job: Job, steps: int) -> list[float]:
    """Train in the plainest way, and return the loss of each step."""
    torch.manual_seed(7)  # for dropout
    losses: list[float] = []
    for step in range(steps):
        job.optimizer.zero_grad()
        parts = zip(*[tensor.chunk(job.accumulation) for tensor in tensors(job.batch(step))], strict=True)
        total = 0.0
        for part in parts:
            loss = job.loss(job.model, part[0] if len(part) == 1 else part) / job.accumulation
            loss.backward()
            total += loss.item()
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.clip_norm)
        job.optimizer.step()
        assert job.scheduler is not None
        job.scheduler.step()
        losses.append(total)
    return losses


# -- data ----------------------------------------------------------------------------------------


@every_job
def test_a_batch_depends_on_the_step_alone(name: str) -> None:
    job, other = built(name), built(name)
    forward = [job.batch(step) for step in range(5)]
    torch.manual_seed(99)
    torch.rand(3)
    backward = [other.batch(step) for step in reversed(range(5))][::-1]
    assert all(map(same, forward, backward))
    assert not same(forward[0], forward[1])


@every_job
def test_a_batch_that_was_written_to_is_drawn_anew(name: str) -> None:
    job = built(name)
    first = [tensor.clone() for tensor in tensors(job.batch(3))]
    for tensor in tensors(job.batch(3)):
        tensor.zero_()
    assert same(job.batch(3), tuple(first))


@every_job
def test_drawing_and_building_leave_torchs_and_numpys_generators_alone(name: str) -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"]
    built(name).batch(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], numpy_before)


@every_job
def test_another_data_seed_gives_other_batches_and_the_same_weights(name: str) -> None:
    job, other = built(name), built(name, data_seed="1")
    assert not same(job.batch(0), other.batch(0))
    assert same(tuple(job.model.parameters()), tuple(other.model.parameters()))


@every_job
def test_another_init_seed_gives_other_weights_and_the_same_batches(name: str) -> None:
    job, other = built(name), built(name, init_seed="1")
    assert same(job.batch(0), other.batch(0))
    assert not same(tuple(job.model.parameters()), tuple(other.model.parameters()))


@every_job
def test_a_negative_step_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="step -1 is outside"):
        built(name).batch(-1)


def test_each_epoch_visits_each_image_once_in_another_order() -> None:
    order = np.concatenate([digits.visited(step, 7, 30, seed=0) for step in range(13)])
    epochs = [list(order[start : start + 30]) for start in (0, 30, 60)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_batch_larger_than_the_set_visits_each_image_equally_often() -> None:
    drawn = Counter(digits.visited(2, 25, 5, seed=0).tolist())
    assert drawn == dict.fromkeys(range(5), 5)


def test_every_fifth_digit_is_held_out() -> None:
    everything = digits.read_digits()
    training, held_out = everything.split()
    assert (len(training.labels), len(held_out.labels)) == (1438, 359)
    assert np.array_equal(held_out.images, everything.images[4::5])


def test_the_last_tenth_of_the_text_is_held_out() -> None:
    training, held_out = text.Corpus(b"abcdefghijklmnopqrstuvwxyz").split()
    assert (training, held_out) == (b"abcdefghijklmnopqrstuvw", b"xyz")


def test_tokens_spell_the_text_in_the_vocabulary() -> None:
    sample = b"for x in range(3):\n    yield ~x"
    assert "".join(text.VOCABULARY[token] for token in text.tokens_of(sample)).encode() == sample


def test_the_text_has_no_character_outside_the_vocabulary() -> None:
    characters = set(text.read_corpus().text.decode("ascii"))
    assert characters <= set(text.VOCABULARY)
    assert len(text.read_corpus().text) > 300_000


def test_the_targets_of_a_text_batch_are_the_characters_that_follow() -> None:
    tokens, following = built("text").batch(0)
    assert torch.equal(tokens[:, 1:], following[:, :-1])
    spelled = "".join(text.VOCABULARY[token] for token in [*tokens[0].tolist(), following[0, -1].item()])
    assert spelled.encode() in text.read_corpus().split()[0]


def test_blocks_reach_both_ends_of_the_text() -> None:
    tokens = np.arange(10)
    firsts = {
        int(text.drawn_blocks(tokens, step, 8, 7, seed=0, purpose="test")[:, 0].min()) for step in range(20)
    }
    lasts = {
        int(text.drawn_blocks(tokens, step, 8, 7, seed=0, purpose="test")[:, -1].max()) for step in range(20)
    }
    assert (min(firsts), max(lasts)) == (0, 9)
    scored = text.spread_blocks(tokens, 7)
    assert (scored[0, 0].item(), scored[-1, -1].item(), len(scored)) == (0, 9, text.SCORED_BLOCKS)


def test_a_block_longer_than_the_text_is_refused() -> None:
    with pytest.raises(InvalidInput, match="empty"):
        text.drawn_blocks(np.arange(10), 0, 8, 11, seed=0, purpose="test")


def test_the_digest_of_the_digits_is_that_of_all_bytes() -> None:
    data = digits.read_digits()
    expected = hashlib.sha256(data.images.tobytes() + data.labels.tobytes()).hexdigest()
    assert built("digits").dataset_digest == expected
    # Of the file in scikit-learn 1.9.1; another value means other data.
    assert expected == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_one_changed_pixel_changes_the_digest() -> None:
    data = digits.read_digits()
    images = data.images.copy()
    images[1000, 4, 4] ^= 1
    assert digits.Digits(images, data.labels).digest != data.digest


@needs_transformers
def test_text_and_gpt2_name_the_same_text() -> None:
    expected = hashlib.sha256(text.read_corpus().text).hexdigest()
    assert built("text").dataset_digest == built("gpt2").dataset_digest == expected


def test_cached_digits_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        digits.read_digits().images[0, 0, 0] = 1


# -- settings ------------------------------------------------------------------------------------


@every_job
def test_an_unknown_setting_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(
        InvalidInput, match=rf"job {name}: unknown setting step='40'; known are steps, batch, "
    ):
        built(name, step="40")
    assert built(name, steps="40").steps == 40


@every_job
@pytest.mark.parametrize("value", ["0", "-1", "", " 5", "5.0", "1e3", "٥", "1_000", "9" * 30, "many"])
def test_a_number_of_steps_that_is_none_is_refused(name: str, value: str) -> None:
    with pytest.raises(
        InvalidInput, match=f"job {name}: setting steps must be a whole number from 1 to 10000000, got"
    ):
        built(name, steps=value)


@pytest.mark.parametrize("name", ["digits", "text", pytest.param("gpt2", marks=needs_transformers)])
@pytest.mark.parametrize("value", ["0.95", "-0.1", "nan", "inf", "1e999", ".5", "0,1", ""])
def test_a_dropout_outside_its_range_is_refused(name: str, value: str) -> None:
    with pytest.raises(
        InvalidInput, match=f"job {name}: setting dropout must be a number from 0 to 0.9, got"
    ):
        built(name, dropout=value)
    assert built(name, dropout="0.9")


@pytest.mark.parametrize(
    ("name", "wrong", "right", "reason"),
    [
        (
            "text",
            {"batch": "3"},
            {"batch": "4"},
            "accumulation must divide batch, got accumulation=2 and batch=3",
        ),
        ("text", {"heads": "3"}, {"heads": "4"}, "heads must divide width, got heads=3 and width=32"),
        pytest.param(
            "gpt2", {"block": "17"}, {"block": "16"}, "block=17 and positions=16", marks=needs_transformers
        ),
        pytest.param(
            "gpt2",
            {"attention": "flash"},
            {"attention": "eager"},
            "attention must be one of sdpa, eager, got 'flash'",
            marks=needs_transformers,
        ),
        ("digits", {"batch": "1"}, {"batch": "2"}, "batch must be a whole number from 2 to 4096, got '1'"),
    ],
)
def test_settings_that_do_not_fit_are_refused_and_their_neighbours_accepted(
    name: str, wrong: dict[str, str], right: dict[str, str], reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason):
        built(name, **wrong)
    assert built(name, **right)


@pytest.mark.parametrize("module", [digits, text, gpt2, resnet50])
def test_the_docstring_lists_every_setting_with_its_default(module: ModuleType) -> None:
    kind = {
        digits: digits.DigitsSettings,
        text: text.TextSettings,
        gpt2: gpt2.Gpt2Settings,
        resnet50: resnet50.ResNet50Settings,
    }[module]
    documented = dict(word.split("=") for word in (module.__doc__ or "").split() if word.count("=") == 1)
    assert {
        name: float(value)
        for name, value in documented.items()
        if name in vars(kind()) and name not in ("attention", "blocks")
    } == {name: value for name, value in vars(kind()).items() if name not in ("attention", "blocks")}


def test_gpt2_without_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InvalidInput, match=r"install the extra tallystick\[transformers\]"):
        built("gpt2")


def test_digits_without_scikit_learn_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InvalidInput, match=r"install the extra tallystick\[jobs\]"):
        digits.read_digits.__wrapped__()


# -- models --------------------------------------------------------------------------------------


def test_parameter_counts_are_those_documented() -> None:
    counts = {name: size(find_source(name).build({})) for name in ("digits", "text", "resnet50")}
    assert counts == {"digits": 48_202, "text": 1_012_096, "resnet50": 23_520_842}
    assert all(
        f"{counts[module.__name__.split('.')[-1]]:,} parameters" in (module.__doc__ or "")
        for module in (digits, text, resnet50)
    )


def test_pixels_of_a_large_digit_are_those_of_the_small_one_sixteen_times() -> None:
    images, labels = resnet50.enlarged(digits.read_digits().take(np.arange(3)))
    small, _ = digits.read_digits().take(np.arange(3)).tensors()
    assert (images.shape, labels.shape) == ((3, 3, 32, 32), (3,))
    assert torch.equal(images[:, :, ::4, ::4], small.expand(3, 3, 8, 8))
    assert torch.equal(images[:, 1, 3::4, 2::4], small[:, 0])


def test_every_shipped_name_has_a_source() -> None:
    assert all(find_source(name).path == f"tallystick.jobs.{name}" for name in SHIPPED)


@every_job
def test_a_model_is_built_in_float32(name: str) -> None:
    assert {parameter.dtype for parameter in built(name).model.parameters()} == {torch.float32}


def test_keys_have_a_bias_of_their_own_and_the_head_is_the_embedding() -> None:
    names = {name for name, _ in built("text").model.named_parameters()}
    assert "layers.0.attention.key.bias" in names
    assert not any("head" in name for name in names)


@every_job
def test_matrices_decay_and_vectors_do_not(name: str) -> None:
    groups = built(name).optimizer.param_groups
    if name in ("digits", "resnet50"):
        assert [group["weight_decay"] for group in groups] == [5e-4]
        return
    decayed, plain = groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}


def test_characters_do_not_see_what_follows() -> None:
    job = built("text")
    job.model.eval()
    tokens, _ = job.batch(0)
    changed = tokens.clone()
    changed[:, 20:] = 0
    before, after = job.model(tokens), job.model(changed)
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-6)
    assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-6)


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    rates = [text.warmup_cosine(step, 100, 10) for step in range(101)]
    assert rates[0] == pytest.approx(1 / 11)
    assert max(rates) == rates[10] == 1.0
    assert rates[100] == pytest.approx(0.1)
    assert text.warmup_cosine(1000, 100, 10) == rates[100]
    assert text.warmup_cosine(0, 1, 0) == 1.0
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("name", ["digits", "text", "resnet50"])
def test_a_few_steps_lower_the_loss_on_held_out_data(name: str) -> None:
    larger = {"batch": "32", "width": "8", "learning_rate": "0.05"} if name == "resnet50" else {}
    job = built(name, **larger)
    assert job.evaluate is not None
    before = job.evaluate(job.model)
    losses = trained(job, 40)
    after = job.evaluate(job.model)
    assert losses[-1] < 0.9 * losses[0]
    assert after["held_out_loss"] < 0.9 * before["held_out_loss"]
    assert after["held_out_accuracy"] > before["held_out_accuracy"]


@needs_transformers
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_tiny_gpt2_learns_with_its_own_loss(attention: str) -> None:
    job = built("gpt2", attention=attention, learning_rate="0.01", dropout="0")
    assert job.model.get_parameter("transformer.wte.weight").shape == (50257, 32)
    assert max(job.batch(0).flatten().tolist()) < 128
    losses = trained(job, 6)
    assert losses[-1] < losses[0]


@every_job
def test_evaluation_is_repeatable_and_leaves_the_model_as_it_was(name: str) -> None:
    job = built(name)
    assert job.evaluate is not None
    job.model.train()
    before = {key: value.clone() for key, value in job.model.state_dict().items()}
    scores = job.evaluate(job.model)
    assert scores == job.evaluate(job.model)
    assert job.model.training
    after = job.model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    job.model.eval()
    job.evaluate(job.model)
    assert not job.model.training


@every_job
def test_a_model_in_float64_is_evaluated_in_float64(name: str) -> None:
    job = built(name)
    assert job.evaluate is not None
    scores, double = job.evaluate(job.model), job.evaluate(job.model.double())
    assert scores["held_out_loss"] == pytest.approx(double["held_out_loss"], rel=1e-4)
