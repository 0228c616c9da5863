from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from harness_ext.contracts import Feature, PromptRequest
from harness_ext.engine import store as store_module
from harness_ext.engine.answer import answer_requests
from harness_ext.engine.fingerprint import model_fingerprint
from harness_ext.engine.forward import LastStateModel
from harness_ext.engine.store import FeatureStore, cache_info, cache_root, clear_cache
from harness_ext.engine.tokens import PromptEncoder

F = Feature()
KEYS = [bytes([i]) * 16 for i in range(6)]
STATES = np.arange(24, dtype=np.float32).reshape(6, 4)


def open_store(root: Path, fingerprint: str = "a" * 32) -> FeatureStore:
    return FeatureStore(root, fingerprint, description="tiny (float32)")


def shards(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


def filled(root: Path) -> FeatureStore:
    store = open_store(root)
    store.add(F, KEYS[:4], STATES[:4])
    store.close()
    return open_store(root)


def test_what_is_stored_is_found_in_any_order(tmp_path: Path) -> None:
    found, states = filled(tmp_path).get(F, [KEYS[5], KEYS[2], KEYS[0]])
    assert found.tolist() == [False, True, True]
    assert np.array_equal(states, STATES[[2, 0]])


@pytest.mark.parametrize("other", [Feature(1), Feature(pooling="mean")])
def test_another_feature_or_model_never_hits(tmp_path: Path, other: Feature) -> None:
    assert not filled(tmp_path).get(other, KEYS)[0].any()
    assert not open_store(tmp_path, "b" * 32).get(F, KEYS)[0].any()


def test_many_small_writes_become_one_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "FLUSH_SECONDS", 0.0)
    store = open_store(tmp_path)
    for key, state in zip(KEYS, STATES, strict=True):
        store.add(F, [key], state[np.newaxis])
    assert len(shards(tmp_path)) == len(KEYS)
    store.close()
    assert len(shards(tmp_path)) == 1
    assert np.array_equal(open_store(tmp_path).get(F, KEYS)[1], STATES)


def test_shards_are_merged_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "FLUSH_SECONDS", 0.0)
    store = open_store(tmp_path)
    for key, state in zip(KEYS, STATES, strict=True):
        store.add(F, [key], state[np.newaxis])
    one = shards(tmp_path)[0].stat().st_size
    monkeypatch.setattr(store_module, "SHARD_BYTES", 2 * one)
    store.close()
    assert len(shards(tmp_path)) == 3
    assert np.array_equal(open_store(tmp_path).get(F, KEYS)[1], STATES)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def other_version(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"format":"1"', b'"format":"9"'))


def no_safetensors(path: Path) -> None:
    path.write_bytes(b"\x80\x04not what it says")


@pytest.mark.parametrize("damage", [cut_short, flip_a_bit, other_version, no_safetensors])
def test_a_damaged_shard_is_skipped_with_a_warning(tmp_path: Path, damage, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path)
    second = open_store(tmp_path)
    second.add(F, KEYS[4:], STATES[4:])
    second.close()
    damage(shards(tmp_path)[0])
    found, states = open_store(tmp_path).get(F, KEYS)
    assert found.tolist() == [False] * 4 + [True] * 2
    assert np.array_equal(states, STATES[4:])
    assert "cannot be used" in caplog.text
    assert "cache clear" in caplog.text


def test_a_full_disk_stops_storing_but_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module, "save_file", full)
    store.add(F, KEYS, STATES)
    store.close()
    store.add(F, KEYS, STATES)
    store.close()
    assert caplog.text.count("No space left on device") == 1
    assert "HARNESS_EXT_CACHE" in caplog.text
    assert [path for path in tmp_path.rglob("*") if path.suffix in {".safetensors", ".tmp"}] == []


def test_a_store_that_cannot_be_made_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = open_store(tmp_path / "file")
    store.add(F, KEYS, STATES)
    store.close()
    assert not store.get(F, KEYS)[0].any()
    assert "cannot be written" in caplog.text


def _add_rows(root: str, start: int) -> None:
    store_module.FLUSH_SECONDS = 0.0
    store = open_store(Path(root))
    for i in range(start, start + 40):
        store.add(F, [i.to_bytes(16, "big")], np.full((1, 4), i, dtype=np.float32))
    store.close()


def test_two_processes_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add_rows, args=(str(tmp_path), start)) for start in (0, 20)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found, states = open_store(tmp_path).get(F, [i.to_bytes(16, "big") for i in range(60)])
    assert found.all()
    assert np.array_equal(states[:, 0], np.arange(60))


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.setenv("HARNESS_EXT_CACHE", "off")
    assert cache_root() is None
    monkeypatch.delenv("HARNESS_EXT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "harness_ext"


def test_info_and_clear(tmp_path: Path) -> None:
    filled(tmp_path)
    open_store(tmp_path, "b" * 32)
    (tmp_path / "not ours").mkdir()
    (tmp_path / "not ours" / "thesis.tex").write_text("…")
    entries = {entry.fingerprint: entry for entry in cache_info(tmp_path)}
    assert entries["a" * 32].rows == 4
    assert entries["a" * 32].description == "tiny (float32)"
    assert entries["b" * 32].rows == 0
    with pytest.raises(KeyError, match="Known: aaaa"):
        clear_cache(tmp_path, "c" * 32)
    assert clear_cache(tmp_path, "a" * 32) == entries["a" * 32].bytes
    assert clear_cache(tmp_path) > 0
    assert cache_info(tmp_path) == []
    assert (tmp_path / "not ours" / "thesis.tex").exists()
    assert cache_info(tmp_path / "nowhere") == []


# ------------------------------------------------------------------------------------------------- fingerprint


def test_fingerprint_is_of_the_weights_not_of_the_name() -> None:
    first, second = tiny_model("gpt2"), tiny_model("gpt2")
    second.config._name_or_path = "somewhere/else"
    assert model_fingerprint(first) == model_fingerprint(second)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_fingerprint_changes_with_one_bit(family: str) -> None:
    model = tiny_model(family)
    before = model_fingerprint(model)
    weight = next(model.parameters())
    bits = weight.detach().view(torch.int32)
    bits[-1, -1] ^= 1
    assert model_fingerprint(model) != before
    bits[-1, -1] ^= 1
    assert model_fingerprint(model) == before


def test_fingerprint_changes_with_dtype_config_and_adapter() -> None:
    model = tiny_model("llama")
    prints = {model_fingerprint(model), model_fingerprint(model, autocast_dtype=torch.bfloat16)}
    prints.add(model_fingerprint(tiny_model("llama", dtype=torch.bfloat16)))
    model.config.rms_norm_eps = 1e-3
    prints.add(model_fingerprint(model))
    model.config.rms_norm_eps = 1e-6
    peft = pytest.importorskip("peft")
    for alpha in (8, 16):
        adapted = peft.get_peft_model(
            tiny_model("llama"), peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"])
        )
        prints.add(model_fingerprint(adapted))
    assert None not in prints
    assert len(prints) == 6


# ------------------------------------------------------------------------------------------------- whole passes

TEXTS = [f"film number {i} This movie is" for i in range(12)]
F_ONLY = [PromptRequest(features=(F,))] * len(TEXTS)
REQUESTS = [PromptRequest((" great", " outstanding"), (Feature(), Feature(1)))] * len(TEXTS)


def run(root: Path | None, *, model=None, texts=TEXTS, requests=REQUESTS):
    model = model or tiny_model("gpt2")
    fingerprint = model_fingerprint(model)
    return answer_requests(
        texts,
        requests,
        model=LastStateModel(model, device=torch.device("cpu")),
        encoder=PromptEncoder(tiny_tokenizer(), max_length=128, add_special_tokens=None, prefix_token_id=0),
        store=None if root is None else FeatureStore(root, str(fingerprint), description="tiny"),
        max_rows=2,
        max_tokens=4096,
        progress=False,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_pass_forwards_nothing_and_answers_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model("gpt2", dtype=dtype)
    first, cold = run(tmp_path, model=model)
    second, warm = run(tmp_path, model=model)
    assert (cold.from_store, cold.forwarded) == (0, cold.distinct_prompts + cold.word_continuations)
    assert (warm.from_store, warm.forwarded, warm.tokens) == (cold.forwarded, 0, 0)
    for a, b in zip(first, second, strict=True):
        assert a.key == b.key
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)
        for feature in (Feature(), Feature(1)):
            assert np.array_equal(a.source.take([a.row], feature), b.source.take([b.row], feature))


def test_only_what_is_missing_is_forwarded(tmp_path: Path) -> None:
    run(tmp_path, texts=TEXTS[:5], requests=[PromptRequest((" great",))] * 5)
    _, summary = run(tmp_path, requests=[PromptRequest((" great",))] * len(TEXTS))
    assert (summary.from_store, summary.forwarded) == (5, 7)
    # A layer that was not stored needs a new forward; f(s) alone does not.
    _, summary = run(tmp_path, requests=[PromptRequest(features=(Feature(),))] * len(TEXTS))
    assert summary.forwarded == 0
    _, summary = run(tmp_path, requests=[PromptRequest(features=(Feature(1),))] * len(TEXTS))
    assert summary.forwarded == len(TEXTS)


def test_the_store_moves_no_score(tmp_path: Path) -> None:
    without, _ = run(None)
    run(tmp_path, texts=TEXTS[3:9], requests=REQUESTS[:6])
    mixed, _ = run(tmp_path)
    for a, b in zip(without, mixed, strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)


SLOW_RUN = """
import sys, time
from pathlib import Path
import torch
from harness_ext.engine import plan, store as store_module
store_module.FLUSH_SECONDS = 0.0
plan.MIN_SHARED = 2.0  # no prompt shares a row with another
import test_store
from tiny import tiny_model
model = tiny_model("gpt2")
forward, batches = model.transformer.forward, []
def slow(*args, **kwargs):
    batches.append(1)
    print("batch", len(batches), flush=True)
    time.sleep(0.2)
    return forward(*args, **kwargs)
model.transformer.forward = slow
test_store.run(Path(sys.argv[1]), model=model, requests=test_store.F_ONLY)
"""


def test_a_killed_run_loses_at_most_its_last_batch(tmp_path: Path) -> None:
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLOW_RUN), str(tmp_path)], stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()).strip() != b"batch 4":
        assert line, "the run ended before it was killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    _, summary = run(tmp_path, requests=F_ONLY)
    # Three batches of two were complete when the fourth began.
    assert summary.from_store == 6
    assert summary.forwarded == len(TEXTS) - 6


def test_nothing_in_the_store_is_executable(tmp_path: Path) -> None:
    run(tmp_path)
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors", ".json"}
    for path in tmp_path.rglob("*.json"):
        json.loads(path.read_text())
