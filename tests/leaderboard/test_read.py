"""Result files of every schema, and files that are none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from result_files import lab_json, loss_config, result_file, sample, task_config, write, write_samples

from harness_ext.leaderboard import records, untrusted
from harness_ext.leaderboard.read import lab_of, read_results, result_record
from harness_ext.leaderboard.records import FileRecord, TaskRecord

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "leaderboard"
OLD_FILES = sorted(path for path in GOLDEN.rglob("*.json") if path.name.startswith("results"))


def record(value: Any) -> FileRecord:
    return result_record(value, digest="0" * 64)


def only_task(value: Any) -> TaskRecord:
    (task,) = record(value).tasks
    return task


@pytest.mark.parametrize("path", OLD_FILES, ids=lambda path: path.relative_to(GOLDEN).parts[-2])
def test_every_old_file_loads(path: Path) -> None:
    found = read_results(path)
    assert found.problems == ()
    assert found.model.name in {"tiny/gpt2", "gpt2", "dummy", "EleutherAI/pythia-1b"}
    for task in found.tasks:
        assert task.metrics
        assert all(value is None or math.isfinite(value) for pair in task.metrics.values() for value in pair)
    columns = {task.column.id: task.column for task in found.tasks}
    again = json.loads(json.dumps(records.to_json(found)))
    assert records.from_json(again, columns) == found


def test_one_task_of_three_versions_of_lm_eval_is_one_column() -> None:
    paths = [
        next(GOLDEN.glob(pattern)) for pattern in ("lm_eval-0.4.3/*.json", "lm_eval-0.4.7/*.json", "*/plain/*.json")
    ]
    found = [read_results(path) for path in paths]
    assert {of.model.name for of in found} == {"tiny/gpt2"}
    assert len({task.column.id for of in found for task in of.tasks}) == 1
    assert [of.versions["lm_eval"] for of in found] == ["0.4.?", "0.4.?", "0.4.13"]
    assert all(of.tasks[0].metrics["acc"] == [0.5, pytest.approx(0.08, abs=1e-3)] for of in found)


def test_files_of_lm_eval_0_3() -> None:
    found = read_results(GOLDEN / "lm_eval-0.3" / "results.json")
    by_name = {task.column.task: task for task in found.tasks}
    assert by_name["hellaswag"].metrics == {"acc": [0.41, 0.0049], "acc_norm": [0.53, 0.005]}
    assert by_name["lambada_openai"].lower_is_better == ["ppl"]
    assert {task.column.num_fewshot for task in found.tasks} == {5}
    assert (found.model.dtype, found.model.num_parameters, found.date) == ("float16", None, None)
    assert found.versions == {"lm_eval": "0.3"}


def test_files_of_lm_eval_0_4_0() -> None:
    found = read_results(GOLDEN / "lm_eval-0.4.0" / "results.json")
    by_name = {task.column.task: task for task in found.tasks}
    assert set(by_name) == {"mmlu", "mmlu_stem", "boolq", "wikitext"}
    assert by_name["boolq"].column.version == "2"
    assert by_name["mmlu"].column.version == ""
    # The address of a function is another one in every run.
    assert by_name["wikitext"].column.settings["doc_to_target"] == "<function wikitext_detokenizer>"
    assert by_name["wikitext"].column.kind == "other"


def test_our_own_tasks_are_told_by_their_reports() -> None:
    found = read_results(next((GOLDEN / "lm_eval-0.4.13" / "probe").glob("*.json")))
    by_name = {task.column.task: task for task in found.tasks}
    probe, loss, flatness = by_name["probe_sst"], by_name["loss_wikitext"], by_name["flatness_wikitext"]
    assert (probe.column.kind, probe.column.features, probe.chance) == ("probe", "f", pytest.approx(14 / 24))
    assert [layer for layer, *_ in probe.prompt_results[0]["layers"]] == [0, 1, 2]
    assert probe.limit == "24 of 1,821"
    assert probe.samples is not None
    assert len(probe.samples.keys) == 24
    assert loss.loss is not None
    assert loss.loss["text"].startswith("5762fdc7")
    assert "24 of 8,559 blocks of 128" in loss.loss["text"]
    assert (flatness.column.kind, flatness.main_metrics[0]) == ("flatness", "fisher_trace")
    traces = sum(traces["fisher_trace"] for *_, traces in flatness.parts)
    assert traces == pytest.approx(flatness.metrics["fisher_trace"][0], rel=1e-6)


def test_a_sweep_has_its_prompts() -> None:
    task = only_task(json.loads(next((GOLDEN / "lm_eval-0.4.13" / "sweep").glob("*.json")).read_text()))
    assert task.column.kind == "natural"
    assert len(task.column.prompts) == len(task.prompt_results) == 14
    assert task.column.prompts[0]["label_words"].keys() == {"negative", "positive"}
    mean = sum(result["metrics"]["acc"] for result in task.prompt_results) / 14
    assert task.metrics["acc"][0] == pytest.approx(mean)


def test_a_name_does_not_make_a_task_ours() -> None:
    assert only_task(result_file(["natural_questions"])).column.kind == "other"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "N/A", None, "", True, [1], 10**400, "1" * 50])
def test_what_is_no_number_is_a_blank(bad: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "results.json", result_file(acc=bad, stderr=bad) | {"x": 1})
    if bad in ("", True, [1], "1" * 50) or bad == "":
        with pytest.raises(ValueError, match="no metrics"):
            read_results(path)
        return
    (task,) = read_results(path).tasks
    assert task.metrics == {"acc": [None, None]}


def test_numbers_as_text_are_numbers_and_negative_errors_are_not() -> None:
    assert only_task(result_file(acc="0.5", stderr=-0.1)).metrics == {"acc": [0.5, None]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("pretrained=org/m,dtype=bfloat16,revision=v2", ("org/m", "bfloat16", "v2", [])),
        (
            {"pretrained": "org/m", "dtype": "auto", "load_in_8bit": True},
            ("org/m", None, "main", [["load_in_8bit", "true"]]),
        ),
        ("pretrained=org/m,max_length=64,peft=a,b", ("org/m", None, "main", [["max_length", "64"], ["peft", "a,b"]])),
        ("pretrained=org/m,device_map=auto,batch_size=4,api_key=secret", ("org/m", None, "main", [])),
    ],
)
def test_model_arguments_as_text_or_mapping(given: Any, expected: tuple[Any, ...]) -> None:
    config = {"model_args": given, "model_dtype": None, "model_revision": None}
    model = record(result_file(config=config)).model
    assert (model.name, model.dtype, model.revision, model.model_args) == expected


def test_secrets_are_not_shown() -> None:
    made = record(result_file(config={"model_args": "pretrained=org/m,api_key=sk-secret,token=hf_secret"}))
    assert "secret" not in json.dumps(records.to_json(made))


def test_credentials_reach_neither_the_table_nor_the_command_nor_the_settings() -> None:
    header = {"Authorization": "Bearer sk-hidden"}
    secret = {
        "header": header,
        "api_key": "hidden",
        "client": {"a": {"x-cookie": "hidden"}},
        "url": "http://h?key=hidden",
    }
    address = "https://user:hidden@host/v1"
    config = task_config(metadata={"version": 1.0, "base_url": address, "other": "https://u:hidden@h", **secret})
    found = record(
        result_file(
            config={"model_args": {"pretrained": "a", "base_url": address, "address": address} | secret},
            configs={"reviews": config},
            model_name=address,
        )
    )
    assert "hidden" not in json.dumps(records.to_json(found))
    assert "hidden" not in json.dumps([task.column.fields() for task in found.tasks])
    assert found.model.model_args == [["address", "https://host/v1"]]
    assert "base_url=https://host/v1" in found.tasks[0].command
    text = 'pretrained=a,header={"Authorization": "Bearer hidden", "X": "k=hidden"},base_url=http://u:hidden@h/,b=1'
    found = record(result_file(config={"model_args": text}))
    assert "hidden" not in json.dumps(records.to_json(found))
    assert found.model.model_args == [["b", "1"]]


def test_special_tokens_are_arguments_that_tell_models_apart() -> None:
    found = record(result_file(config={"model_args": "pretrained=a,add_bos_token=True"}))
    assert found.model.model_args == [["add_bos_token", "True"]]


def test_a_run_without_a_name_is_called_by_its_backend() -> None:
    """lm_eval makes up another name for each such run."""
    made = record(result_file(config={"model": "dummy", "model_args": {}}, model_name="i82qcls7"))
    assert made.model.name == "dummy"


@pytest.mark.parametrize("version", ["0.5.0", "1.0", "0.40.1", "new", "0.2.0"])
def test_unknown_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(ValueError, match=f"lm_eval_version is '{version}'"):
        record(result_file(lm_eval_version=version))


@pytest.mark.parametrize("version", ["0.4.13", "0.4", "0.4.14.dev0", "0.3.0"])
def test_known_versions(version: str) -> None:
    assert record(result_file(lm_eval_version=version)).versions["lm_eval"] == version


@pytest.mark.parametrize("value", [None, [], 3, {}, {"results": []}, {"model": "bert"}])
def test_other_json_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="expected a result file of lm_eval"):
        record(value)


def test_predict_only_has_nothing_to_show() -> None:
    with pytest.raises(ValueError, match="predict_only"):
        record(result_file({"reviews": {"alias": "reviews", "bypass": "text"}}))


def test_a_broken_task_does_not_lose_the_others() -> None:
    found = result_file(["reviews"])
    found["results"]["broken"] = "text"
    made = record(found)
    assert [task.column.task for task in made.tasks] == ["reviews"]
    assert "'broken'" in made.problems[0]


def test_bytes_that_are_no_json(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for content, message in (
        (b"{", "expected JSON"),
        (b"\xff\xfe", "expected UTF-8"),
        (b"[" * 100_000, "expected JSON"),
        (b'{"results": {"a": {"acc,none": ' + b"1" * 5000 + b"}}}", "expected"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_results(path)


def test_a_byte_order_mark_is_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(result_file()).encode())
    assert read_results(path).tasks


# -------------------------------------------------------------------------------------------- what is a configuration

BASE = result_file()


@pytest.mark.parametrize(
    "other",
    [
        result_file(shots=5),
        result_file(version=2.0),
        result_file(["other_reviews"]),
        result_file(configs={"reviews": task_config(doc_to_text="{{text}}\nIs it good?")}),
        result_file(configs={"reviews": task_config(dataset_path="org/other")}),
        result_file(configs={"reviews": task_config(test_split="test2")}),
        result_file(configs={"reviews": task_config(doc_to_choice=["bad", "good"])}),
        result_file(configs={"reviews": task_config(description="Classify.")}),
        result_file(configs={"reviews": task_config(generation_kwargs={"temperature": 1})}),
        result_file(configs={"reviews": task_config(metadata={"version": 1.0, "variant": "hard"})}),
        result_file(chat_template="{{ messages }}", chat_template_sha="f" * 64),
    ],
)
def test_other_configurations_are_other_columns(other: dict[str, Any]) -> None:
    assert only_task(other).column.id != only_task(BASE).column.id


@pytest.mark.parametrize(
    "same",
    [
        result_file(acc=0.1, date=5.0, documents=7),
        result_file(model="org/other", config={"model_args": {"pretrained": "org/other", "dtype": "float16"}}),
        result_file(
            configs={"reviews": task_config(target_delimiter=" ", fewshot_delimiter="\n\n", description="", repeats=1)}
        ),
        # --metadata and model_args go to all tasks of a run.
        result_file(
            configs={
                "reviews": task_config(metadata={"version": 1.0, "pretrained": "org/tiny-1M", "probe": {"n_train": 5}})
            }
        ),
        result_file(
            configs={"reviews": task_config(metadata={"version": 1.0, "config_source": "/home/me/reviews.yaml"})}
        ),
        result_file(configs={"reviews": task_config(fewshot_config={"sampler": "default"}, unsafe_code=False)}),
    ],
)
def test_what_does_not_change_a_task_is_the_same_column(same: dict[str, Any]) -> None:
    assert only_task(same).column.id == only_task(BASE).column.id


def flat(**options: Any) -> dict[str, Any]:
    config = loss_config(
        window_flatness={"blocks": options.get("max_blocks", 64), "include": ["*"], "exclude": [], "seed": 0}
    )
    config["metadata"] |= {"flatness": options} if options else {}
    return result_file({"flatness_text": {"fisher_trace,none": 5.0}}, configs={"flatness_text": config})


def test_flatness_settings_that_change_numbers_and_those_that_do_not() -> None:
    base = only_task(flat()).column.id
    assert only_task(flat(quantities=["fisher_trace"])).column.id == base
    assert only_task(flat(max_blocks=64)).column.id == base
    assert only_task(flat(max_blocks=8)).column.id != base
    assert only_task(flat(labels="sampled")).column.id != base


def test_a_sample_of_a_dataset_is_another_column_and_says_so() -> None:
    def of(**report: Any) -> TaskRecord:
        config = task_config(metadata={"version": 1.0, "report": {"features": "f", "documents": 100} | report})
        return only_task(result_file(["probe_news"], configs={"probe_news": config}))

    whole, sample = of(), of(sample={"test": "100 of 7,600"})
    assert whole.column.id != sample.column.id
    assert "sample" not in whole.column.settings
    assert "100 of 7,600" in sample.column.settings["sample"]
    assert "a sample: of split test 100 of 7,600 rows" in sample.notes
    assert not any("sample" in note for note in whole.notes)


def test_losses_of_other_texts_blocks_or_parts_do_not_compare() -> None:
    def text(effective: int | None = None, **report: Any) -> str:
        made = result_file(
            {"loss_text": {"loss,none": 3.0, "bits_per_byte,none": 1.1}},
            configs={"loss_text": loss_config(**report)},
            effective=effective,
        )
        loss = only_task(made).loss
        assert loss is not None
        return str(loss["text"])

    assert text() == text(num_tokens=6000)  # bits per byte are for all tokenizers
    assert len({text(), text(text_sha256="00" * 32), text(block_tokens=1024), text(effective=10)}) == 4
    # Of a part of a text, tokenizers read different parts.
    assert text(effective=10) != text(effective=10, num_tokens=6000)


def test_tokenizers_are_told_by_the_tokens_of_the_text_where_the_file_has_them() -> None:
    def tokenizer(eos: str = "<eos>", **report: Any) -> str | None:
        made = result_file(
            {"loss_text": {"loss,none": 3.0, "bits_per_byte,none": 1.1}}, configs={"loss_text": loss_config(**report)}
        )
        loss = only_task(made | {"tokenizer_eos_token": [eos, 0]}).loss
        assert loss is not None
        return loss["tokenizer"]

    first = tokenizer(tokenizer_sha256="ab" * 32)
    assert first == "ab" * 6
    assert first == tokenizer("</s>", tokenizer_sha256="ab" * 32)
    assert first != tokenizer(tokenizer_sha256="cd" * 32)
    # Older files: one tokenizer has one number of tokens and one EOS.
    assert tokenizer() == tokenizer() != tokenizer(num_tokens=6000)
    assert tokenizer() != tokenizer("</s>")
    assert tokenizer(num_tokens=None) is None


def test_limits() -> None:
    assert only_task(result_file(documents=100)).limit is None
    assert only_task(result_file(documents=100, effective=20)).limit == "20 of 100"
    # --limit of more than there is
    assert only_task(result_file(documents=100, config={"limit": 500.0})).limit is None
    old = result_file(config={"limit": 20.0})
    del old["n-samples"]
    assert only_task(old).limit == "--limit 20"


def test_the_command_is_quoted() -> None:
    hostile = "org/a; rm -rf ~ `x` $(y) 'z'"
    command = only_task(result_file(model=hostile, shots=3)).command
    import shlex

    words = shlex.split(command)
    assert words[:4] == ["lm_eval", "--model", "hf", "--model_args"]
    assert words[4] == f"pretrained={hostile}"
    assert words[-2:] == ["--num_fewshot", "3"]


# -------------------------------------------------------------------------------------------------- untrusted values

HOSTILE = [
    "<script>alert(1)</script>",
    "a" * 5000,
    "../../etc/passwd",
    "модель/名前/🤖",
    "quote\"'`",
    "\ud800",
    "line\nbreak\ttab\x00nul",
    "\u202egnp.exe",
    "",
]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names(name: str) -> None:
    made = result_file({name: {"acc,none": 0.5, name: 0.1}}, model=name, configs={name: task_config(dataset_path=name)})
    made["config"] |= {"model_revision": name, "model_dtype": name}
    found = record(made)
    for text in (found.model.name, found.tasks[0].column.task, found.model.revision, found.tasks[0].column.dataset):
        assert len(text) <= untrusted.MAX_NAME
        text.encode("utf-8")
        assert not set(text) & set("\n\r\t\x00\u202e")
    json.dumps(records.to_json(found), ensure_ascii=False).encode("utf-8")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["report", "prompts", "acc,none", "version", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
PLACES = [
    ("results",), ("results", "reviews"), ("results", "reviews", "acc,none"), ("configs",), ("configs", "reviews"),
    ("configs", "reviews", "metadata"), ("configs", "reviews", "doc_to_choice"), ("configs", "reviews", "metric_list"),
    ("versions",), ("n-shot",), ("n-shot", "reviews"), ("higher_is_better",), ("n-samples",), ("n-samples", "reviews"),
    ("config",), ("config", "model_args"), ("config", "limit"), ("config", "model_dtype"), ("date",), ("model_name",),
    ("chat_template",), ("chat_template_sha",), ("group_subtasks",), ("harness_ext",), ("samples",), ("lm_eval_version",),
    ("system_instruction",), ("tokenizer_bos_token",),
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PLACES), JSON)
def test_no_value_in_any_place_breaks_more_than_its_file(place: tuple[str, ...], value: Any) -> None:
    made = result_file()
    inside: Any = made
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    try:
        found = record(made)
    except ValueError:
        return
    json.dumps(records.to_json(found), allow_nan=False, ensure_ascii=False).encode("utf-8")


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["natural", "probe", "loss", "flatness"]), st.sampled_from(
    ["prompts", "features", "documents", "majority_rate", "options", "text_sha256", "num_tokens", "block_tokens",
     "window_flatness", "cut_documents", "overlap"]), JSON)  # fmt: skip
def test_no_value_in_a_report_breaks_more_than_its_file(kind: str, key: str, value: Any) -> None:
    report: dict[str, Any] = {
        "natural": {"prompts": [{"name": "a", "label_words": {"x": ["y"]}, "metrics": {"acc": 0.5}}]},
        "probe": {"features": "f", "prompts": [{"name": "document", "acc": 0.5}]},
        "loss": {"text_sha256": "00", "num_tokens": 4},
        "flatness": {"window_flatness": {"by_parameter": {"a.0.b.weight": {"size": 1, "fisher_trace": 2.0}}}},
    }[kind]
    config = task_config(metadata={"report": report | {key: value}})
    try:
        found = record(result_file(configs={"reviews": config}))
    except ValueError:
        return
    json.dumps(records.to_json(found), allow_nan=False, ensure_ascii=False).encode("utf-8")


# ---------------------------------------------------------------------------------------------------------- lab.json


def test_lab_json(tmp_path: Path) -> None:
    lab = lab_of(write(tmp_path / "lab.json", lab_json()))
    assert (lab["run"], lab["step"], lab["excess"], lab["language"]) == ("adamw-w64", 600, [0.02, 0.0003], "hmm")
    made = result_record(result_file(model="/tmp/x"), digest="0", lab=lab)
    assert made.model.name == "adamw-w64-00000600"


@pytest.mark.parametrize("value", [{}, [], lab_json(schema_version=3), lab_json(run=None), lab_json(language={})])
def test_other_lab_files_are_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lab\.json"):
        lab_of(write(tmp_path / "lab.json", value))


# ----------------------------------------------------------------------------------------------------------- samples


def test_samples_join_by_task_and_date(tmp_path: Path) -> None:
    date = "2026-01-01T00-00-00.0"
    path = write(tmp_path / f"results_{date}.json", result_file(["reviews", "more"], documents=4))
    write_samples(tmp_path / f"samples_reviews_{date}.jsonl", [sample(i, i % 2) for i in (2, 0, 3, 1)])
    write_samples(tmp_path / "samples_more_2025-01-01.jsonl", [sample(i, 1.0) for i in range(4)])
    reviews, more = read_results(path).tasks
    assert more.samples is None
    assert reviews.samples is not None
    values, codes = reviews.samples.metrics["acc"]
    right = {key for key, code in zip(reviews.samples.keys, codes, strict=True) if values[int(code)] == 1.0}
    assert right == {sample(i, 0)["doc_hash"][:12] for i in (1, 3)}


def test_samples_of_a_named_json_file(tmp_path: Path) -> None:
    path = write(tmp_path / "mine_2026-01-01T00-00-00.0.json", result_file(documents=2))
    write_samples(tmp_path / "samples_reviews_2026-01-01T00-00-00.0.jsonl", [sample(0, 1.0), sample(1, 0.0)])
    assert read_results(path).tasks[0].samples is not None


def test_samples_inside_the_results() -> None:
    made = result_file(documents=2) | {"samples": {"reviews": [sample(0, 1.0), sample(1, 0.0)]}}
    samples = only_task(made).samples
    assert samples is not None
    assert samples.file == ""
    assert len(samples.keys) == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([sample(0, 1.0)], "there are 1 documents"),
        ([sample(0, 1.0), sample(0, 1.0)], "document 0 is there twice"),
        ([sample(0, 1.0, doc_hash=None, doc=None), sample(1, 1.0)], "neither doc_hash nor doc"),
        ([sample(0, 1.0) | {"doc_id": "x"}, sample(1, 1.0)], "doc_id is 'x'"),
    ],
)
def test_bad_samples_are_left_out_with_a_reason(lines: list[Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "results_1.json", result_file(documents=2))
    write_samples(tmp_path / "samples_reviews_1.jsonl", lines)
    found = read_results(path)
    assert found.tasks[0].samples is None
    assert found.tasks[0].metrics
    assert message in found.problems[0]


def test_a_task_name_is_no_path(tmp_path: Path) -> None:
    write_samples(tmp_path / "samples_x_1.jsonl", [sample(0, 1.0)])
    name = "../samples_x"
    path = write(tmp_path / "in" / "results_1.json", result_file({name: {"acc,none": 1.0}}, documents=1))
    assert read_results(path).tasks[0].samples is None


def test_documents_that_repeat_pair_up_in_order(tmp_path: Path) -> None:
    lines = [sample(0, 1.0, "same text twice"), sample(2, 0.0, "same text twice"), sample(1, 1.0, "another")]
    for entry in lines:
        entry["doc_hash"] = "a" * 64 if "same" in entry["doc"]["text"] else "b" * 64
    path = write(tmp_path / "results_1.json", result_file(documents=3))
    write_samples(tmp_path / "samples_reviews_1.jsonl", lines)
    samples = read_results(path).tasks[0].samples
    assert samples is not None
    assert samples.keys == ["a" * 12, "a" * 12 + "#2", "b" * 12]
    assert samples.metrics["acc"] == [[0.0, 1.0], "101"]


def test_files_without_hashes_get_the_hash_of_lm_eval(tmp_path: Path) -> None:
    """A real file of lm_eval 0.4.13 with its hashes taken away gives the same keys."""
    source = next((GOLDEN / "lm_eval-0.4.13" / "plain").glob("*.json"))
    lines = [json.loads(line) for line in next(source.parent.glob("*.jsonl")).read_text("utf-8").splitlines()]
    expected = read_results(source).tasks[0].samples
    assert expected is not None
    path = tmp_path / source.name
    path.write_bytes(source.read_bytes())
    for entry in lines:
        del entry["doc_hash"]
    write_samples(tmp_path / next(source.parent.glob("*.jsonl")).name, lines)
    found = read_results(path).tasks[0].samples
    assert found is not None
    assert found.keys == expected.keys
    # lm_eval 0.4.0 wrote one list.
    next(tmp_path.glob("*.jsonl")).write_text(json.dumps(lines, indent=2))
    assert read_results(path).tasks[0].samples == found
