// The list of tasks, and one task: its prompts and label words, what each prompt gave, and how models are distributed.
"use strict";

const {showTasks, showTask} = (() => {
  const KIND_TEXT = {
    natural: "the task as sentence completion",
    probe: "logistic regression on the model's features",
    quad: "regression on features that minimise the Quad loss",
    kernel: "kernel regression on the empirical tangent kernel",
    finetune: "prompt-based fine-tuning",
    other: "lm_eval's own and other people's",
    loss: "pretraining loss",
    flatness: "curvature of the pretraining loss",
  };

  const valuesOf = (board, column, limited = false) =>
    board.models.map(({place}) => ({place, cell: board.score(column, place, limited)})).filter(({cell}) => cell);

  function showTasks(page, {board}) {
    const kinds = [...new Set(board.columns.map(({kind}) => kind))];
    fill(
      page,
      element("h1", {}, "Tasks"),
      element(
        "p",
        {class: "lede"},
        "A column of the table is a task under one configuration: its version, shots, prompts and settings. Numbers of different configurations are never ranked together.",
      ),
      kinds.map((kind) =>
        section(
          kind,
          element("p", {class: "muted small"}, KIND_TEXT[kind] ?? ""),
          dataTable(
            `Tasks of the kind ${kind}`,
            [
              ["Task"],
              ["Dataset"],
              ["Metric"],
              ["Shots", {number: true}],
              ["Prompts", {number: true}],
              ["Chance, %", {number: true}],
              ["Models", {number: true}],
              ["Best", {number: true}],
            ],
            board.columns
              .filter((column) => column.kind === kind)
              .map((column) => {
                const all = valuesOf(board, column);
                const best = all.sort((a, b) =>
                  column.better ? b.cell.value - a.cell.value : a.cell.value - b.cell.value,
                )[0]?.cell;
                return [
                  link(address("task", [column.id]), column.label),
                  element("bdi", {}, column.dataset),
                  column.metric,
                  column.num_fewshot ?? "",
                  column.prompt_names.length || "",
                  column.chance === null ? "" : percent(column.chance),
                  all.length,
                  best
                    ? [
                        showScore(best.value, column.bounded),
                        " ",
                        element("span", {class: "interval"}, showInterval(best.interval, column.bounded)),
                      ]
                    : "",
                ];
              }),
          ),
        ),
      ),
    );
    return "Tasks";
  }

  async function showTask(page, {board, parts, signal}) {
    const id = parts[0] ?? "";
    const column = board.columnById.get(id);
    if (!column) {
      fill(
        page,
        element(
          "div",
          {class: "notice"},
          element("h1", {}, "No such task"),
          element("p", {}, `This board has no task with the id ${clip(id, 40)}.`),
          element("p", {}, link("#/tasks", "All tasks")),
        ),
      );
      return "No such task";
    }
    const file = await harnessExt.load(`columns/${id}`);
    if (signal.aborted) return null;
    const full = file.column;
    const mixed = (column.lm_eval_versions?.length ?? 0) > 1;
    fill(
      page,
      element("p", {class: "crumb"}, link("#/tasks", "Tasks")),
      element("h1", {class: "break"}, element("bdi", {}, column.label)),
      element(
        "p",
        {class: "lede"},
        [KIND_TEXT[column.kind] ?? column.kind, column.features ? `features ${column.features}` : null, column.dataset]
          .filter(Boolean)
          .join(" · "),
      ),
      mixed
        ? element(
            "p",
            {class: "notice"},
            `‡ Results come from lm_eval ${column.lm_eval_versions.join(" and ")}, which may compute the metric differently.`,
          )
        : null,
      distribution(board, column, file, signal),
      promptsSection(board, column, file, signal),
      templates(full),
      section(
        "Configuration",
        definitions([
          ["Task", full.task],
          ["Version", full.version],
          ["Dataset", full.dataset],
          ["Metric", full.metric],
          ["Other metrics", full.metrics.slice(1).join(", ")],
          ["Examples in the prompt", full.num_fewshot === null ? null : String(full.num_fewshot)],
          ["Chat template", full.chat ? "applied" : "not applied"],
          ["Documents", full.num_documents === null ? null : showCount(full.num_documents)],
          ["Chance", full.chance === null ? null : `${percent(full.chance)} %`],
          ["lm_eval", full.lm_eval_versions.join(", ")],
          ...Object.entries(full.settings),
        ]),
      ),
    );
    return column.label;
  }

  function distribution(board, column, file, signal) {
    const metrics = Object.keys(file.metrics).filter((name) => file.metrics[name].model.length);
    if (!metrics.length)
      return section(
        "Models",
        element("p", {class: "muted"}, "No full run has a number for this task."),
        limitedRuns(board, column),
      );
    const select = element(
      "select",
      {id: "metric", on: {change: paint}},
      metrics.map((name) => element("option", {value: name, selected: name === column.metric}, name)),
    );
    const host = element("div");
    const chart = figure({
      title: null,
      signal,
      describe: "Distribution of the models' scores; the table below has the same numbers.",
      draw,
    });
    let state = null;

    function work() {
      const metric = select.value;
      const {model, value, stderr} = file.metrics[metric];
      const main = metric === column.metric;
      const bounded = main ? column.bounded : value.every((number) => number === null || (number >= 0 && number <= 1));
      const better = file.column.higher_is_better[metric] ?? true;
      const rows = model
        .map((id, at) => {
          const place = board.place.get(id);
          const cell = main ? board.score(column, place, false) : null;
          return {
            id,
            model: board.models[place],
            value: value[at],
            interval: cell ? cell.interval : scoreInterval(value[at], stderr[at], null, bounded),
          };
        })
        .filter((row) => row.value !== null)
        .sort((a, b) => (better ? b.value - a.value : a.value - b.value));
      return {metric, main, bounded, better, rows};
    }

    function draw(width) {
      const {metric, main, bounded, rows} = state;
      const scale = bounded ? 100 : 1;
      const label = bounded ? `${metric}, %` : metric;
      const chance = main && column.chance !== null ? [scale * column.chance] : [];
      const few = rows.length <= 40;
      if (!few) {
        return Plot.plot({
          ...plotOptions(width, 260),
          x: axisBelow(label),
          y: {label: "↑ Models", labelArrow: "none", grid: true},
          marks: [
            Plot.rectY(
              rows,
              Plot.binX(
                {y: "count"},
                {x: (row) => scale * row.value, fill: kindColour(column.kind), thresholds: 30, inset: 0.5, tip: true},
              ),
            ),
            Plot.ruleX(chance, {strokeDasharray: "4 3"}),
            Plot.text(chance, {
              x: (value) => value,
              text: () => "chance",
              frameAnchor: "top",
              dx: 4,
              dy: -10,
              textAnchor: "start",
              fill: "currentColor",
            }),
            Plot.ruleY([0]),
          ],
        });
      }
      const left = Math.min(260, width * 0.45);
      const keys = rows.map(({id}) => id);
      const names = new Map(rows.map((row) => [row.id, row.model.name]));
      return Plot.plot({
        ...plotOptions(width, 64 + 21 * rows.length),
        marginLeft: left,
        marginTop: 18,
        x: axisBelow(label, {grid: true, nice: true}),
        y: rowNames(keys, left, (id) => names.get(id)),
        marks: [
          Plot.ruleX(chance, {strokeDasharray: "4 3", strokeOpacity: 0.7}),
          Plot.text(chance, {
            x: (value) => value,
            text: () => "chance",
            frameAnchor: "top",
            dy: -12,
            fill: "currentColor",
          }),
          Plot.ruleY(
            rows.filter(({interval}) => interval),
            {
              y: "id",
              x1: ({interval}) => scale * interval[0],
              x2: ({interval}) => scale * interval[1],
              stroke: kindColour(column.kind),
              strokeWidth: 2,
              strokeOpacity: 0.65,
            },
          ),
          Plot.dot(rows, {
            y: "id",
            x: (row) => scale * row.value,
            r: 4,
            fill: kindColour(column.kind),
            tip: true,
            title: (row) =>
              `${clip(row.model.name, 60)}\n${showScore(row.value, bounded)} ${showInterval(row.interval, bounded)}`,
          }),
        ],
      });
    }

    const AT_FIRST = 50;
    function paint() {
      state = work();
      const {bounded, rows, better} = state;
      const table = (count) =>
        dataTable(
          `Models by ${state.metric}`,
          [["Model"], ["Parameters", {number: true}], [`${state.metric}${bounded ? ", %" : ""}`, {number: true}]],
          rows
            .slice(0, count)
            .map((row) => [
              [
                link(address("model", [row.id]), row.model.name),
                " ",
                element("span", {class: "interval"}, modelDetails(row.model)),
              ],
              row.model.num_parameters ? showParameters(row.model.num_parameters) : "",
              [
                showScore(row.value, bounded),
                " ",
                element("span", {class: "interval"}, showInterval(row.interval, bounded)),
              ],
            ]),
        );
      fill(
        host,
        better ? null : element("p", {class: "muted small"}, "Lower is better."),
        table(AT_FIRST),
        rows.length > AT_FIRST
          ? element(
              "button",
              {type: "button", class: "button", on: {click: (event) => event.target.replaceWith(table(rows.length))}},
              `All ${showCount(rows.length)} models`,
            )
          : null,
        limitedRuns(board, column),
      );
      chart.redraw();
    }
    const result = section(
      "Models",
      metrics.length > 1
        ? element("p", {class: "inline-field"}, element("label", {for: "metric"}, "Metric "), select)
        : null,
      chart,
      host,
    );
    paint();
    return result;
  }

  /** Runs on some of the documents only, apart from the others. */
  function limitedRuns(board, column) {
    const rows = board.models
      .map((model) => ({model, cell: column.limited ? board.score(column, model.place, true) : null}))
      .filter(({cell}) => cell && cell.limit !== null);
    return rows.length
      ? element(
          "details",
          {},
          element("summary", {}, `† ${plural(rows.length, "model")} with a limited run only`),
          dataTable(
            "Limited runs",
            [["Model"], ["Limit"], [`${column.metric}${column.bounded ? ", %" : ""}`, {number: true}]],
            rows.map(({model, cell}) => [
              [
                link(address("model", [model.id]), model.name),
                " ",
                element("span", {class: "interval"}, modelDetails(model)),
              ],
              element("bdi", {}, cell.limit),
              [
                showScore(cell.value, column.bounded),
                " ",
                element("span", {class: "interval"}, showInterval(cell.interval, column.bounded)),
              ],
            ]),
          ),
        )
      : null;
  }

  function promptsSection(board, column, file, signal) {
    const {names, model, acc} = file.prompts;
    if (names.length < 2 || !model.length) return null;
    const points = model
      .flatMap((id, row) => names.map((name, at) => ({id, name, value: acc[row][at]})))
      .filter(({value}) => value !== null);
    if (!points.length) return null;
    const summary = names
      .map((name) => {
        const values = points
          .filter((point) => point.name === name)
          .map(({value}) => value)
          .sort((a, b) => a - b);
        const middle = values.length >> 1;
        return {name, values, median: values.length % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2};
      })
      .filter(({values}) => values.length);
    return section(
      "What each prompt gave",
      figure({
        title: "Accuracy by prompt",
        note: "a dot is a model, the bar the median",
        signal,
        describe: "Accuracies of all models on each prompt; the table below has a summary.",
        draw: (width) => {
          const left = Math.min(200, width * 0.35);
          return Plot.plot({
            ...plotOptions(width, 60 + 26 * summary.length),
            marginLeft: left,
            marginTop: 8,
            x: axisBelow("Accuracy, %", {grid: true}),
            y: rowNames(summary.map(({name}) => name), left),
            marks: [
              Plot.dot(points, {
                x: ({value}) => 100 * value,
                y: "name",
                r: 3.5,
                fill: kindColour(column.kind),
                fillOpacity: points.length > 400 ? 0.25 : 0.65,
                tip: points.length <= 2000,
                title: ({id, name, value}) =>
                  `${clip(board.models[board.place.get(id)].name, 60)}\n${name}: ${percent(value)}`,
              }),
              Plot.tickX(summary, {x: ({median}) => 100 * median, y: "name", strokeWidth: 2.5, inset: 2}),
              column.chance === null
                ? null
                : Plot.ruleX([100 * column.chance], {strokeDasharray: "4 3", strokeOpacity: 0.6}),
            ],
          });
        },
      }),
      dataTable(
        "Accuracy by prompt",
        [
          ["Prompt"],
          ["Models", {number: true}],
          ["Worst, %", {number: true}],
          ["Median, %", {number: true}],
          ["Best, %", {number: true}],
        ],
        summary.map(({name, values, median}) => [
          element("bdi", {}, name),
          values.length,
          percent(values[0]),
          percent(median),
          percent(values.at(-1)),
        ]),
      ),
    );
  }

  function templates(column) {
    if (!column.prompts.length) return null;
    return section(
      column.prompts.length === 1 ? "Prompt" : "Prompts",
      column.prompts.map((prompt) =>
        element(
          "article",
          {class: "prompt"},
          prompt.name ? element("h3", {class: "break"}, element("bdi", {}, prompt.name)) : null,
          element("pre", {class: "code", tabindex: 0, "aria-label": "Template", dir: "auto"}, prompt.template),
          Object.keys(prompt.label_words).length
            ? definitions(
                Object.entries(prompt.label_words).map(([name, words]) => [
                  name,
                  element(
                    "span",
                    {},
                    words.map((word) => element("span", {class: "tag word"}, element("bdi", {}, word))),
                  ),
                ]),
              )
            : null,
          prompt.digest
            ? element("p", {class: "muted small"}, "Digest ", element("code", {}, prompt.digest.slice(0, 16)))
            : null,
        ),
      ),
    );
  }

  return {showTasks, showTask};
})();
