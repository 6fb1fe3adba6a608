"""Checkpoints: what is saved comes back bit for bit, a changed file is refused, no kill harms one."""

from __future__ import annotations

import ast
import itertools
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minitorch
from minitorch import SGD, Adam, FastBackend, SimpleBackend
from minitorch.training.checkpoints import (
    Checkpoints,
    TrainingState,
    read_training,
    remove_partials,
    save_training,
)
from minitorch.training.model_files import (
    CheckpointError,
    load_parameters,
    read_checkpoint,
    save_checkpoint,
)
from minitorch.training.random_states import random_state, set_random_state

from ...support.models.raw_safetensors import raw_safetensors

ROOT = Path(__file__).parents[3]

BACKENDS = {"simple": SimpleBackend, "fast": FastBackend}


# -- models --------------------------------------------------------------------------------------


def tiny_model(**options: Any) -> minitorch.DecoderLM:
    return minitorch.DecoderLM(5, 8, 2, 6, n_layer=1, middle_dim=16, **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_checkpoint_restores_every_parameter(dtype: str, tmp_path: Path) -> None:
    model, other = tiny_model(dtype=dtype), tiny_model(dtype=dtype)
    path = tmp_path / "m.safetensors"
    save_checkpoint(path, model, {"width": 8})
    arrays, config = read_checkpoint(path)
    load_parameters(other, arrays)
    assert config == {"width": 8}
    with pytest.raises(CheckpointError, match="not the state of its training"):
        read_training(path)
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert np.array_equal(p.value.to_numpy(), q.value.to_numpy()), name
        assert q.value.requires_grad() and q.value.dtype == p.value.dtype


def test_weights_of_another_dtype_or_not_finite_change_nothing(tmp_path: Path) -> None:
    model, path = tiny_model(), tmp_path / "m.safetensors"
    save_checkpoint(path, model, {})
    arrays, _ = read_checkpoint(path)
    name = next(iter(arrays))
    before = {name: p.value.to_numpy().copy() for name, p in model.named_parameters()}
    for wrong in (
        arrays[name][:-1],
        arrays[name].astype(np.float16),
        np.zeros(arrays[name].shape, np.int64),
        np.full_like(arrays[name], np.nan),
    ):
        with pytest.raises(CheckpointError, match=f"{name} .*(shape|float16|int64|NaN)"):
            load_parameters(model, {**arrays, name: wrong}, str(path))
    for key, p in model.named_parameters():
        assert np.array_equal(p.value.to_numpy(), before[key]), key
    p = model.parameters()[0]
    p.update(minitorch.from_numpy(np.full_like(p.value.to_numpy(), np.inf)))
    with pytest.raises(CheckpointError, match="not saved"):
        save_checkpoint(path, model, {})
    assert np.array_equal(read_checkpoint(path)[0][name], arrays[name])


def test_a_failed_write_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "m.safetensors", tiny_model()
    save_checkpoint(path, model, {"step": 1})

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, model, {"step": 2})
    assert read_checkpoint(path)[1] == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_on_the_disk_before_its_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    flush, rename = os.fsync, os.replace

    def flushed(number: int) -> None:
        done.append("folder" if os.path.samestat(os.fstat(number), tmp_path.stat()) else "file")
        flush(number)

    def renamed(*args: Any) -> None:
        done.append("rename")
        rename(*args)

    monkeypatch.setattr("os.fsync", flushed)
    monkeypatch.setattr("os.replace", renamed)
    save_checkpoint(tmp_path / "m.safetensors", tiny_model(), {})
    assert done == ["file", "rename", "folder"]


def test_writers_of_one_file_in_several_threads_do_not_collide(tmp_path: Path) -> None:
    path, model = tmp_path / "m.safetensors", tiny_model()
    with ThreadPoolExecutor(8) as threads:
        for _ in threads.map(lambda n: save_checkpoint(path, model, {"n": n}), range(64)):
            read_checkpoint(path)
    assert [*tmp_path.iterdir()] == [path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folder")


# -- training ------------------------------------------------------------------------------------


class Run:
    """A training of a tiny model with dropout, on drawn numbers."""

    def __init__(self, backend: str = "fast", kind: str = "Adam", seed: int = 0):
        minitorch.manual_seed(seed)
        self.model = minitorch.DecoderLM(
            5, 4, 2, 3, 0.2, n_layer=1, middle_dim=4, backend=BACKENDS[backend], dtype=np.float32
        )
        parameters = self.model.parameters()
        self.optimizer = SGD(parameters, 0.1) if kind == "SGD" else Adam(parameters, 0.01)
        self.rng = np.random.default_rng(seed)
        self.losses: list[float] = []

    def go(self, steps: int) -> Run:
        for _ in range(steps):
            tokens = self.rng.integers(0, 5, (2, 4))
            self.optimizer.zero_grad()
            # Dropout draws from one of the two, depending on the backend.
            noise = random.random() + np.random.rand()
            loss = self.model.loss(tokens[:, :-1], tokens[:, 1:]) * (1.0 + noise)
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
        return self

    def save(self, path: Path) -> None:
        save_training(path, self.model, self.optimizer, {}, len(self.losses), {"data": self.rng})

    def save_in(self, checkpoints: Checkpoints) -> Path:
        return checkpoints.save(self.model, self.optimizer, {}, len(self.losses))

    def restore(self, state: TrainingState) -> Run:
        state.restore(self.model, self.optimizer, {"data": self.rng})
        return self


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_training_goes_on_bit_for_bit(backend: str, kind: str, tmp_path: Path) -> None:
    first = Run(backend, kind).go(2)
    first.save(tmp_path / "t.safetensors")
    first.go(3)
    state = read_training(tmp_path / "t.safetensors")
    other = Run(backend, kind, seed=1).go(1).restore(state)
    assert state.step == 2
    assert other.go(3).losses[1:] == first.losses[2:]
    for p, q in zip(first.model.parameters(), other.model.parameters(), strict=True):
        assert p.value.to_numpy().tobytes() == q.value.to_numpy().tobytes()


@given(st.lists(st.integers(0, 3), max_size=3), st.booleans())
def test_parameters_of_any_shape_and_layout_come_back(
    folder: Path, shape: list[int], turned: bool
) -> None:
    model = minitorch.Module()
    array = np.arange(float(np.prod(shape))).reshape(shape)
    value = minitorch.from_numpy(array)
    model.add_parameter(
        "w", value.permute(*reversed(range(len(shape)))) if turned and shape else value
    )
    optimizer = Adam(model.parameters())
    optimizer.moments[model.w] = model.w.value.detach(), model.w.value.detach()
    save_training(folder / "t", model, optimizer, {}, 0, arrays={"more": array.T})
    state = read_training(folder / "t")
    state.restore(model, optimizer)
    wanted = array.T if turned else array
    for found in (model.w.value, optimizer.moments[model.w][0]):
        assert found.shape == wanted.shape and np.array_equal(found.to_numpy(), wanted)
    assert np.array_equal(state.arrays["more"], array.T)


def damaged(part: str, name: str, value: Any) -> Any:
    """Return a function that puts a value into a part of a training's state; None removes it."""

    def damage(state: TrainingState) -> None:
        found = getattr(state, part)
        for key in name.split("/")[:-1]:
            found = found[key]
        if value is None:
            del found[name.split("/")[-1]]
        else:
            found[name.split("/")[-1]] = value

    return pytest.param(damage, id=f"{name} is {value!r:.20}")


@pytest.mark.parametrize(
    "damage",
    [
        damaged("random", "generators/data", None),
        damaged("random", "numpy/state/pos", 10**9),
        damaged("random", "numpy/bit_generator", "PCG64"),
        damaged("random", "generators/data/state/inc", "1"),
        damaged("random", "python", [3, [2**32] * 625, "x"]),
        damaged("optimizer", "lr", "0.01"),
        damaged("optimizer", "beta1", 1.5),
        damaged("optimizer", "steps", 1.5),
        damaged("optimizer", "steps", 10**400),
        damaged("optimizer", "m.0", np.zeros((2, 2), np.float32)),
        damaged("optimizer", "v.0", np.full((5, 4), np.nan, np.float32)),
        damaged("optimizer", "v.0", None),
        damaged("parameters", "ln.bias", np.full(4, np.nan, np.float32)),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(damage: Any, tmp_path: Path) -> None:
    path, run = tmp_path / "t.safetensors", Run().go(1)
    run.save(path)
    state = read_training(path)
    damage(state)
    run.go(1)

    def everything() -> bytes:
        arrays = [p.value.to_numpy() for p in run.model.parameters()]
        moments = run.optimizer.state_dict().items()
        arrays += [x.to_numpy() for _, x in moments if isinstance(x, minitorch.Tensor)]
        numbers = [x for _, x in moments if not isinstance(x, minitorch.Tensor)]
        said = json.dumps([numbers, random_state({"data": run.rng})]).encode()
        return b"".join(x.tobytes() for x in arrays) + said

    before = everything()
    with pytest.raises(CheckpointError, match=r"t\.safetensors: (?s:(?!\n).)*\Z"):
        run.restore(state)
    assert everything() == before
    run.go(1)


def shares_of(run: Any, count: int) -> list[Any]:
    """Return optimisers that hold the moments of a share of the parameters each."""
    shares = []
    for rank in range(count):
        share = Adam(run.model.parameters(), lr=0.01)
        share.steps = run.optimizer.steps
        own = run.model.parameters()[rank::count]
        share.moments = {p: x for p, x in run.optimizer.moments.items() if p in own}
        shares.append(share)
    return shares


def saved_in_parts(folder: Path, run: Any, step: int) -> Path:
    """Save a training as three ranks do."""
    checkpoints, (first, *others) = Checkpoints(folder), shares_of(run, 3)
    parts = [checkpoints.save_part(x, step, i, 3) for i, x in enumerate(others, 1)]
    return checkpoints.save(run.model, first, {}, step, {"data": run.rng}, parts=parts)


def test_a_checkpoint_in_parts_is_that_of_one_file(tmp_path: Path) -> None:
    run = Run().go(2)
    run.save(tmp_path / "whole")
    whole, parts = (
        read_training(x) for x in (tmp_path / "whole", saved_in_parts(tmp_path, run, 2))
    )
    assert whole.optimizer.keys() == parts.optimizer.keys()
    for name, value in whole.optimizer.items():
        assert np.array_equal(value, parts.optimizer[name]), name


def test_a_part_that_is_missing_or_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    run = Run().go(1)
    first, path = saved_in_parts(tmp_path, run, 1), saved_in_parts(tmp_path, run.go(1), 2)
    part = tmp_path / f"part-2-of-3.{path.name}"
    part.write_bytes((tmp_path / f"part-2-of-3.{first.name}").read_bytes())
    with pytest.raises(CheckpointError, match=f"not the part that belongs to .*{path.name}"):
        read_training(path)
    part.unlink()
    with pytest.raises(CheckpointError, match=r"no such checkpoint.* is intact: .*step-00000001"):
        Checkpoints(tmp_path).read()


def test_parts_go_with_their_checkpoint(tmp_path: Path) -> None:
    run, checkpoints = Run().go(1), Checkpoints(tmp_path, keep=1)
    first = saved_in_parts(tmp_path, run, 1)
    checkpoints.save_part(run.optimizer, 3, 1, 3)  # and then the ranks are killed
    checkpoints.save(run.model, run.optimizer, {}, 2)
    assert not first.exists()
    assert [x.name for x in tmp_path.iterdir() if x.name.startswith("part")] == [
        "part-1-of-3.step-00000003.safetensors"
    ]
    remove_partials(tmp_path)
    assert [x.name for x in tmp_path.iterdir()] == ["step-00000002.safetensors"]


# -- changed files -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder, run = tmp_path_factory.mktemp("files"), Run().go(1)
    save_checkpoint(folder / "model", run.model, {"text": '"digest":"' + 64 * "0", "n": 1})
    run.save(folder / "training")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changed") / "changed.safetensors"


READERS = {"model": read_checkpoint, "training": read_training}


@pytest.mark.parametrize("kind", READERS)
@given(place=st.floats(0.0, 1.0, exclude_max=True), header=st.booleans(), value=st.integers(0, 255))
def test_a_change_of_any_byte_is_refused(
    kind: str, files: dict[str, bytes], changed: Path, place: float, header: bool, value: int
) -> None:
    payload = bytearray(files[kind])
    end = 8 + int.from_bytes(payload[:8], "little") if header else len(payload)
    at = int(place * end)
    payload[at] ^= value
    # Without a change of a value the file is cut off there, or goes on behind its end.
    shown = bytes(payload) if value else bytes(payload[:at]) if header else bytes(payload) + b"x"
    changed.write_bytes(shown)
    with pytest.raises(CheckpointError, match=r"changed\.safetensors"):
        READERS[kind](changed)


@pytest.mark.parametrize(
    "payload",
    [
        raw_safetensors({"w": "F8_E4M3"}, format="minitorch-1", config="{}"),
        *(
            raw_safetensors({}, format="minitorch-1", config="{}", training=text)
            for text in (
                "[]", "{}", 10**5 * "[", "9" * 5000,
                '{"step": "1", "optimizer": {}, "random": {}, "notes": {}}',
                '{"step": 1, "optimizer": [], "random": {}, "notes": {}}',
                '{"step": 1, "optimizer": {}, "random": {}, "notes": {}, "parts": 3}',
                '{"step": 1, "optimizer": {}, "random": {}, "notes": {}, "parts": [{}]}',
            )
        ),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_contents_that_are_no_training_are_refused_in_one_line(
    payload: bytes, changed: Path
) -> None:
    changed.write_bytes(payload)
    with pytest.raises(CheckpointError, match=r"changed\.safetensors: [^\n]*\Z"):
        read_training(changed)


def test_nothing_is_pickled() -> None:
    for path in (ROOT / "minitorch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "marshal", "shelve", "joblib", "dill"} & {*names}, path


# -- the last few --------------------------------------------------------------------------------


def steps(checkpoints: Checkpoints) -> list[int]:
    return [checkpoints.read(file).step for file in checkpoints.files()]


def test_the_last_few_stay_and_the_one_before_a_broken_one_is_offered(tmp_path: Path) -> None:
    checkpoints, run = Checkpoints(tmp_path / "c", keep=3), Run()
    with pytest.raises(CheckpointError, match="c: the folder holds no checkpoint"):
        checkpoints.read()
    for _ in range(5):
        run.go(1).save_in(checkpoints)
    assert steps(checkpoints) == [3, 4, 5] and checkpoints.read().step == 5
    three, four, five = checkpoints.files()
    five.write_bytes(five.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{five.name}: .*is intact: .*{four.name}"):
        checkpoints.read()
    four.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{five.name}: .*is intact: .*{three.name}"):
        checkpoints.read(five)
    three.unlink()
    with pytest.raises(CheckpointError, match=f"{five.name}: (?!.*is whole)"):
        checkpoints.read()


def test_a_new_training_sets_the_last_one_aside(tmp_path: Path) -> None:
    checkpoints, run = Checkpoints(tmp_path / "c"), Run()
    assert checkpoints.set_aside() is None
    for number in (1, 2):
        path = run.go(1).save_in(checkpoints)
        (path.parent / f"{path.name}.123.partial").touch()
        remove_partials(path.parent)
        place = checkpoints.set_aside()
        assert place is not None and steps(Checkpoints(place)) == [number]
        assert checkpoints.files() == [] and len([*place.iterdir()]) == 1
        with pytest.raises(CheckpointError, match=f"the training before it got to .*{path.name}"):
            checkpoints.read()
    with pytest.raises(ValueError, match="keep"):
        Checkpoints(tmp_path, keep=0)


# -- random generators -------------------------------------------------------------------------


@given(
    st.sampled_from(["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"]),
    st.integers(0, 2**32),
    st.integers(0, 5),
)
def test_random_numbers_go_on_where_they_were(kind: str, seed: int, drawn: int) -> None:
    rng = np.random.Generator(getattr(np.random, kind)(seed))
    minitorch.manual_seed(seed)

    def draw() -> list[float]:
        # Small integers and normal numbers leave a half-used word, or a second number, behind.
        return [
            *rng.integers(0, 9, 3, dtype=np.int32), rng.standard_normal(), random.gauss(0.0, 1.0),
            random.getrandbits(63), np.random.standard_normal(), np.random.rand(),
        ]  # fmt: skip

    for _ in range(drawn):
        draw()
    state = json.loads(json.dumps(random_state({"mine": rng})))
    expected = draw()
    set_random_state(state, {"mine": rng})
    assert draw() == expected
    with pytest.raises(ValueError, match="random numbers cannot be restored"):
        set_random_state(state, {"other": rng})
