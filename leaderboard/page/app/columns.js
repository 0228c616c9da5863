// What the table says of a model.
"use strict";

const {gridColumns} = (() => {
  function gridColumns(board, state) {
    const scoreCell = (column) => (row) => {
      const cell = board.score(column, row.place, state.limited);
      if (!cell) return null;
      const marks = [];
      if (cell.limit !== null) marks.push({symbol: "†", title: `limited run: ${cell.limit}`});
      if (cell.conflict) marks.push({symbol: "≠", title: "runs of this configuration found different numbers"});
      if (cell.note) marks.push({symbol: "*", title: "see the model's page for a note"});
      return {
        text: showScore(cell.value, column.bounded),
        side: showInterval(cell.interval, column.bounded),
        marks,
        title: cell.n === null || cell.n === undefined ? "" : plural(cell.n, "document"),
      };
    };
    const mixed = (column) => (column.lm_eval_versions?.length ?? 0) > 1;
    return [
      {
        id: "name",
        label: "Model",
        width: matchMedia("(max-width: 40rem)").matches ? 150 : 260,
        text: true,
        value: ({model}) => model.name,
        show: ({model, place}) => ({
          text: model.name,
          side: modelDetails(model),
          href: address("model", [model.id]),
          title: [model.name, modelDetails(model)].filter(Boolean).join("\n"),
          marks: board.hasFull[place] ? [] : [{symbol: "†", title: "only limited runs"}],
        }),
      },
      {
        id: "family",
        label: "Family",
        width: 110,
        text: true,
        value: ({model}) => model.family ?? "",
        show: ({model}) => ({text: model.family ?? ""}),
      },
      {
        id: "size",
        label: "Parameters",
        width: 96,
        descending: true,
        value: ({model}) => model.num_parameters ?? undefined,
        show: ({model}) =>
          model.num_parameters === undefined
            ? null
            : {text: showParameters(model.num_parameters), title: showCount(model.num_parameters)},
      },
      {
        id: "group",
        label: "Loss group",
        width: 76,
        value: ({group}) => group?.number,
        show: ({group}) =>
          group && {
            text: String(group.number),
            title: `losses from ${significant(group.low, 4)} to ${significant(group.high, 4)}, ${plural(group.rows.length, "model")}`,
          },
      },
      {
        id: "rank",
        label: "Rank in group",
        width: 100,
        value: ({rank}) => (rank ? rank.range[0] + rank.range[1] / 1e6 : undefined),
        show: ({rank}) =>
          rank && {
            text: rank.range[0] === rank.range[1] ? String(rank.range[0]) : `${rank.range[0]}–${rank.range[1]}`,
            side: `of ${rank.of}`,
          },
      },
      {
        id: "loss",
        label: "Loss",
        unit: () => state.axis?.unit ?? "",
        width: 150,
        value: ({loss}) => loss?.value,
        show: ({loss}) =>
          loss && {
            text: fixed(loss.value, 4),
            side: loss.hasStderr ? `± ${(1.96 * loss.stderr).toFixed(4)}` : "no interval",
            marks: loss.limit ? [{symbol: "†", title: `limited run: ${loss.limit}`}] : [],
          },
      },
      {
        id: "flatness",
        label: "Flatness",
        unit: () => (state.flatness ? measureName(state.flatness.measure) : ""),
        width: 136,
        value: ({flatness}) => flatness?.value,
        show: ({flatness}) =>
          flatness && {
            text: significant(flatness.value),
            side: flatness.stderr === null ? "no interval" : `± ${significant(1.96 * flatness.stderr, 2)}`,
            marks: flatness.limit ? [{symbol: "†", title: `limited run: ${flatness.limit}`}] : [],
          },
      },
      {
        id: "mean",
        label: "Mean of shown tasks",
        unit: "0 chance, 100 perfect",
        title:
          "Mean of the shown tasks, each put between chance (0) and perfect (100); only for models that have all of them",
        width: 172,
        descending: true,
        value: ({mean}) => mean.mean ?? undefined,
        show: ({mean}) =>
          mean.n === 0
            ? null
            : mean.mean === null
              ? {text: "", side: `${mean.k} of ${mean.n} tasks`}
              : {
                  text: percent(mean.mean),
                  side:
                    mean.stderr === null
                      ? "no interval"
                      : `[${percent(mean.mean - 1.96 * mean.stderr)}, ${percent(mean.mean + 1.96 * mean.stderr)}]`,
                },
      },
      {
        id: "wins",
        label: "Mean win rate",
        unit: "%",
        width: 84,
        descending: true,
        value: ({mean}) => mean.wins ?? undefined,
        show: ({mean}) => (mean.wins === null ? null : {text: percent(mean.wins)}),
      },
      {
        id: "borda",
        label: "Borda points",
        width: 84,
        descending: true,
        value: ({mean}) => mean.borda ?? undefined,
        show: ({mean}) => (mean.borda === null ? null : {text: String(mean.borda)}),
      },
      ...board.downstream.map((column) => ({
        id: column.id,
        label: column.label,
        width: column.bounded ? 140 : 164,
        descending: column.better,
        title: [column.label, mixed(column) ? `results of lm_eval ${column.lm_eval_versions.join(", ")}` : null]
          .filter(Boolean)
          .join("\n"),
        unit: [
          column.metric,
          column.bounded ? "%" : null,
          column.better ? null : "lower is better",
          mixed(column) ? "‡" : null,
        ]
          .filter(Boolean)
          .join(" · "),
        value: (row) => {
          const value = board.value(column, row.place, state.limited);
          return Number.isNaN(value) ? undefined : value;
        },
        show: scoreCell(column),
      })),
    ];
  }

  return {gridColumns};
})();
