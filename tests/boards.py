"""Synthetic boards for the leaderboard's pages: families, sizes, losses, gaps, conflicts, limited runs and hostile names."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from harness_ext.leaderboard.contracts import (
    ALPHABET,
    Board,
    Coefficient,
    Column,
    Correlation,
    Document,
    Flatness,
    Kind,
    Lab,
    Loss,
    LossGroup,
    Metric,
    Model,
    ModulePart,
    Prompt,
    PromptResult,
    Run,
    Score,
    Unreadable,
    Vector,
)

HOSTILE_NAMES = (
    "<script>document.title='pwned'</script>",
    "<img src=x onerror=\"document.title='pwned'\">",
    "\"><svg/onload=document.title='pwned'>",
    "it's \\ \"quoted\" ${document.title='pwned'} `tick`",
    "org/../../etc/passwd/model",
    "a" * 300,
    "模型/语言模型-七亿",
    "نموذج/لغة عربية ‮gnirts",
    "__proto__",
    "constructor",
    "  \u2028 line separator \u2029 and \ufffd",
    "javascript:document.title='pwned'",
    "😀" * 40,
)
HOSTILE_TEXT = "</script><script>document.title='pwned'</script> ' \" \\ \u2028 <b>bold</b> &amp; {{ 7*7 }}"

KINDS: tuple[Kind, ...] = ("natural", "probe", "quad", "kernel", "finetune", "other")
FAMILIES = ("Pythia", "SmolLM", "Qwen", "OPT", "Llama", "GPT-2")
TEXT = hashlib.sha256(b"text").hexdigest() + "/full"


def model_id(number: int) -> str:
    return f"m{hashlib.sha256(f'model {number}'.encode()).hexdigest()[:12]}"


def column_id(name: str) -> str:
    return f"c{hashlib.sha256(f'column {name}'.encode()).hexdigest()[:12]}"


def synthetic_board(
    num_models: int = 24,
    num_tasks: int = 10,
    *,
    seed: int = 0,
    missing: float = 0.06,
    num_documents: int = 220,
    hostile: bool = True,
    vectors: bool = True,
) -> Board:
    """A board whose scores rise as the loss falls, and at equal loss as the trace falls.

    Args:
        num_models: The last of them are named by `HOSTILE_NAMES`, if `hostile`.
        num_tasks: Downstream columns.
        seed: Of everything.
        missing: Share of scores that are blank.
        num_documents: Of each task.
        hostile: Whether names, texts, prompts and reasons try to break the page.
        vectors: Whether there is right and wrong by document.
    """
    rng = np.random.default_rng(seed)
    hostile_names = HOSTILE_NAMES[: max(0, min(len(HOSTILE_NAMES), num_models // 2))] if hostile else ()
    models, losses = [], []
    skill = np.empty(num_models)
    loss_column = column_id("loss")
    flatness_column = column_id("flatness")
    traces = np.empty(num_models)
    for number in range(num_models):
        family = FAMILIES[number % len(FAMILIES)]
        size = int(10 ** rng.uniform(7.2, 9.9))
        plain_name = f"{family.lower()}-org/{family}-{size / 1e6:.0f}M"
        place = number - (num_models - len(hostile_names))
        name = hostile_names[place] if place >= 0 else plain_name
        models.append(
            Model(
                id=model_id(number),
                name=name,
                revision="main" if number % 5 else f"step{1000 * number}",
                sha=hashlib.sha1(name.encode("utf-8", "surrogatepass")).hexdigest() if number % 3 else None,
                dtype=("bfloat16", "float32", None)[number % 3],
                backend="hf",
                chat_template="0123456789ab" if number % 7 == 3 else None,
                system_instruction=None,
                model_args=(("max_length", "2048"),) if number % 9 == 4 else (),
                family=family if number % 11 else (HOSTILE_TEXT if hostile else "unknown"),
                num_parameters=size if number % 13 else None,
                lab=_lab(number) if number % 8 == 7 else None,
            )
        )
        # Clusters of equal loss, a couple of thousandths wide.
        value = 1.15 - 0.11 * (math.log10(size) - 7.2) + 0.0
        value = round(value / 0.03) * 0.03 + rng.normal(0, 0.0015)
        traces[number] = math.exp(rng.normal(8.5, 0.8))
        skill[number] = 2.2 - 2.4 * (value - 0.8) / 0.3 * 0.5 - 0.25 * (math.log(traces[number]) - 8.5)
        if number % 10 != 9:
            losses.append(
                Loss(
                    model=models[-1].id,
                    column=loss_column,
                    text=TEXT,
                    text_label="Salesforce/wikitext wikitext-2-v1 test",
                    bits_per_byte=Metric(value, 0.0012 + 0.001 * rng.random()),
                    nats_per_token=Metric(value * 2.9 + 0.1 * (number % 3), 0.006),
                    tokenizer=hashlib.sha256(f"tokenizer {number % 3}".encode()).hexdigest(),
                    limit="--limit 100" if number % 16 == 8 else None,
                    num_tokens=287_000,
                )
            )
    columns = [_column(place, num_documents, hostile) for place in range(num_tasks)]
    columns.append(_measure_column(loss_column, "loss_wikitext", "loss", "bits_per_byte"))
    columns.append(_measure_column(flatness_column, "flatness_wikitext", "flatness", "hessian_trace"))

    scores, limited = [], []
    sets: dict[str, tuple[tuple[str, ...], ...]] = {}
    all_vectors: dict[str, tuple[Vector, ...]] = {}
    documents: dict[str, tuple[Document, ...]] = {}
    for place, column in enumerate(columns[:num_tasks]):
        keys = tuple(hashlib.sha256(f"{place} {k}".encode()).hexdigest()[:12] for k in range(num_documents))
        other = tuple(hashlib.sha256(f"{place} other {k}".encode()).hexdigest()[:12] for k in range(num_documents))
        sets[column.id] = (keys, keys[:60], other)
        of_column = []
        hardness = rng.normal(0, 1.4, num_documents)
        for number, model in enumerate(models):
            if rng.random() < missing:
                continue
            only_limited = number % 12 == 11
            documents_used = 60 if only_limited else num_documents
            chance = column.chance or 0.0
            logit = skill[number] - hardness[:documents_used] + rng.normal(0, 0.3)
            right = (rng.random(documents_used) < chance + (1 - chance) / (1 + np.exp(-logit))).astype(float)
            if not column.bounded:
                value, stderr = float(20 / (0.2 + right.mean())), 0.4
            else:
                value = float(right.mean())
                stderr = math.sqrt(value * (1 - value) / (documents_used - 1))
            conflict = number % 14 == 5 and place % 4 == 0
            score = Score(
                model=model.id,
                column=column.id,
                metrics={
                    column.metric: Metric(value, stderr if number % 6 else None),
                    "f1": Metric(max(0.0, value - 0.02), None),
                },
                interval=(max(0.0, value - 1.96 * stderr), min(1.0, value + 1.96 * stderr)) if column.bounded else None,
                num_documents=documents_used,
                limit="--limit 60" if only_limited else None,
                runs=tuple(
                    Run(
                        source=f"{model.id}/results_2026-0{k + 1}.json",
                        copies=(),
                        date=1_770_000_000.0 + 86400 * k,
                        versions={"lm_eval": "0.4.13", "harness_ext": "0.1.0", "transformers": "5.24.0"},
                        command="lm_eval --model hf --model_args "
                        f"'pretrained={model.name},revision={model.revision}' --tasks {column.task} --log_samples",
                        metrics={column.metric: Metric(value - 0.01 * k, stderr)},
                    )
                    for k in range(2 if conflict else 1)
                ),
                conflict=conflict,
                notes=("22 of 220 documents tied",) if number % 9 == 2 and place % 3 == 0 else (),
                prompts=_prompt_results(column, value, place, rng),
            )
            (limited if only_limited else scores).append(score)
            if vectors and column.bounded:
                codes = "".join(ALPHABET[int(one)] for one in right)
                which = 1 if only_limited else 2 if number % 15 == 6 else 0
                of_column.append(Vector(model.id, which, (0.0, 1.0), codes, score.limit))
        all_vectors[column.id] = tuple(of_column)
        documents[column.id] = tuple(
            Document(
                key,
                HOSTILE_TEXT
                if hostile and k == 0
                else f"Document {k} of {column.task}: a film of quiet, stubborn charm.",
                "positive" if k % 2 else "negative",
            )
            for k, key in enumerate(keys[: num_documents * 3 // 4])
        )
    flatness = tuple(
        Flatness(
            model=model.id,
            column=flatness_column,
            measures={
                "hessian_trace": Metric(float(traces[number]), float(traces[number]) * 0.03),
                "fisher_trace": Metric(float(traces[number]) * 1.3, float(traces[number]) * 0.02),
                "hessian_trace_scaled": Metric(float(traces[number]) / 90, None),
                "lambda_max": Metric(float(traces[number]) / 40, None),
            },
            parts=_parts(float(traces[number]), rng) if number < 40 else (),
            limit=None,
        )
        for number, model in enumerate(models)
        if number % 9 != 8
    )
    full = [loss for loss in losses if loss.limit is None]
    full.sort(key=lambda loss: loss.bits_per_byte.value or 0.0)
    groups = (
        (LossGroup(TEXT, 0.01, tuple(loss.model for loss in full[:3]), *_range(full[:3])),) if len(full) >= 3 else ()
    )
    correlations = tuple(
        Correlation(
            text=TEXT,
            flatness_column=flatness_column,
            flatness_measure=measure,
            downstream=column.id,
            models=tuple(model.id for model in models),
            comparable=tuple(model.id for model in models[1:]),
            num_parameters=135_000_000,
            loss_downstream=Coefficient(-0.8 + 0.05 * place, -0.95, -0.6 + 0.05 * place, 0.0005),
            flatness_downstream=Coefficient(-0.5, -0.8, -0.1, 0.02),
            flatness_given_loss=Coefficient(-0.4, -0.75, 0.1, 0.08)
            if place % 3
            else Coefficient(None, reason="3 models"),
            flatness_within_groups=Coefficient(-0.45, -0.8, 0.0, 0.06),
        )
        for measure in ("hessian_trace", "fisher_trace")
        for place, column in enumerate(columns[:num_tasks])
    )
    return Board(
        models=tuple(models),
        columns=tuple(columns),
        scores=tuple(scores),
        limited=tuple(limited),
        losses=tuple(losses),
        flatness=flatness,
        document_sets=sets,
        vectors=all_vectors,
        documents=documents,
        groups=groups,
        correlations=correlations,
        unreadable=(Unreadable("broken/results.json", HOSTILE_TEXT if hostile else "not JSON"),),
        num_files=num_models,
    )


def _range(losses: list[Loss]) -> tuple[float, float]:
    values = [loss.bits_per_byte.value or 0.0 for loss in losses]
    return min(values), max(values)


def _lab(number: int) -> Lab:
    return Lab(
        run=f"adamw-{number}",
        algorithm="adamw",
        algorithm_settings={"lr": 0.001, "betas": [0.9, 0.95]},
        objective="cross_entropy",
        seed=number,
        step=20_000,
        tokens_seen=163_840_000,
        language="hmm",
        language_sha256=hashlib.sha256(b"hmm").hexdigest(),
        architecture={"width": 128, "depth": 4},
        excess=Metric(0.031, 0.001),
        validation_loss=Metric(2.41, 0.004),
    )


def _column(place: int, num_documents: int, hostile: bool) -> Column:
    kind = KINDS[place % len(KINDS)]
    bounded = place % 10 != 9
    metric = "acc" if bounded else "perplexity"
    dataset = ("sst", "imdb", "agnews", "rte", "boolq", "trec")[place // len(KINDS) % 6]
    task = f"{kind}_{dataset}" if kind != "other" else f"arc_{place}"
    if hostile and place == 1:
        task = "<b>task</b>\"'&"
    return Column(
        id=column_id(str(place)),
        task=task,
        version="1.0",
        num_fewshot=0,
        chat=False,
        kind=kind,
        features="f" if kind == "probe" else "",
        dataset=f"org/{dataset}",
        prompts=tuple(
            Prompt(
                name,
                HOSTILE_TEXT if hostile and place == 0 and number == 1 else f"{{{{ text }}}} {name.replace('_', ' ')}",
                {"negative": ("terrible", "bad"), "positive": ("great", "good")},
                hashlib.sha256(name.encode()).hexdigest(),
            )
            for number, name in enumerate(("it_was", "this_movie_is", "all_in_all") if place % 2 == 0 else ("it_was",))
        ),
        label=task if place < len(KINDS) else f"{task} ({place})",
        metric=metric,
        metrics=(metric, "f1"),
        higher_is_better={metric: bounded, "f1": True},
        bounded=bounded,
        is_share=bounded,
        chance=(0.5, 0.25, None)[place % 3] if place % 7 == 5 else (0.5 if bounded else None),
        num_documents=num_documents,
        settings={"split": "test", "doc_to_text": HOSTILE_TEXT if hostile else "text"},
        lm_eval_versions=("0.4.12", "0.4.13") if place % 5 == 3 else ("0.4.13",),
    )


def _measure_column(identifier: str, task: str, kind: Kind, metric: str) -> Column:
    return Column(
        id=identifier,
        task=task,
        version="1.0",
        num_fewshot=0,
        chat=False,
        kind=kind,
        features="",
        dataset="Salesforce/wikitext",
        prompts=(),
        label=task,
        metric=metric,
        metrics=(metric,),
        higher_is_better={metric: False},
        bounded=False,
        is_share=False,
        chance=None,
        num_documents=None,
        settings={},
        lm_eval_versions=("0.4.13",),
    )


def _prompt_results(column: Column, value: float, place: int, rng: np.random.Generator) -> tuple[PromptResult, ...]:
    if not column.bounded or column.kind == "other":
        return ()
    results = []
    for prompt in column.prompts:
        accuracy = float(np.clip(value + rng.normal(0, 0.04), 0, 1))
        peak = 6 + place % 4
        layers = tuple(
            (layer, float(accuracy - 0.004 * (layer - peak) ** 2), float(accuracy - 0.01 - 0.004 * (layer - peak) ** 2))
            for layer in range(13)
        )
        results.append(
            PromptResult(
                prompt.name,
                {"acc": accuracy, "acc_pmi": accuracy + 0.01},
                {"acc": (max(0.0, accuracy - 0.05), min(1.0, accuracy + 0.05))},
                layers=layers if column.kind == "probe" else (),
            )
        )
    return tuple(results)


def _parts(trace: float, rng: np.random.Generator) -> tuple[ModulePart, ...]:
    kinds = (
        "attn.q_proj",
        "attn.k_proj",
        "attn.v_proj",
        "attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "norm",
    )
    parts = [
        ModulePart(-1, "embed_tokens", 28_000_000, {"fisher_trace": trace * 0.2, "fisher_trace_scaled": trace * 0.01})
    ]
    for layer in range(12):
        for kind in kinds:
            share = trace * 0.8 / 96 * math.exp(rng.normal(0, 0.9)) * (1 + layer / 12)
            size = 600 if kind == "norm" else 330_000
            parts.append(ModulePart(layer, kind, size, {"fisher_trace": share, "fisher_trace_scaled": share / 20}))
    return tuple(parts)
