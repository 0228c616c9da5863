// One model: all its scores, how they spread over prompts and layers, where its flatness comes from, and how to repeat each run.
"use strict";

const {showModel, dataTable, definitions, section, marksOf} = (() => {
  async function showModel(page, {board, parts, signal}) {
    const id = parts[0] ?? "";
    if (!board.place.has(id)) return missing(page, "model", id);
    const file = await harnessExt.load(`models/${id}`);
    if (signal.aborted) return null;
    const model = board.models[board.place.get(id)];
    const scores = (file.scores ?? [])
      .map((score) => ({...score, of: board.columnById.get(score.column)}))
      .filter(({of}) => of)
      .sort((a, b) => a.of.place - b.of.place || Boolean(a.limit) - Boolean(b.limit));
    const downstream = scores.filter(({of}) => of.downstream);

    fill(
      page,
      element("p", {class: "crumb"}, link("#/", "Models")),
      element("h1", {class: "break"}, element("bdi", {}, model.name)),
      element(
        "p",
        {class: "lede"},
        [
          model.family,
          model.num_parameters ? `${showParameters(model.num_parameters)} parameters` : null,
          modelDetails(model),
        ]
          .filter(Boolean)
          .join(" · "),
      ),
      compareWith(board, model),
      lossSection(board, model),
      tasksSection(downstream, signal),
      promptsSection(downstream, signal),
      layersSection(downstream, signal),
      flatnessSection(board, file.flatness ?? [], signal),
      labSection(file.model.lab),
      provenanceSection(file.model, scores),
    );
    return model.name;
  }

  function missing(page, what, id) {
    fill(
      page,
      element(
        "div",
        {class: "notice"},
        element("h1", {}, `No such ${what}`),
        element(
          "p",
          {},
          `This board has no ${what} with the id ${clip(id, 40)}. It may have been built again since the link was made.`,
        ),
        element("p", {}, link(what === "model" ? "#/" : "#/tasks", what === "model" ? "All models" : "All tasks")),
      ),
    );
    return `No such ${what}`;
  }

  const section = (title, ...content) => {
    const heading = element("h2", {id: `section-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`}, title);
    return element("section", {"aria-labelledby": heading.id}, heading, content);
  };

  const definitions = (entries) =>
    element(
      "dl",
      {class: "facts"},
      entries
        .filter(([, value]) => value !== null && value !== undefined && value !== "")
        .map(([name, value]) =>
          element(
            "div",
            {},
            element("dt", {}, element("bdi", {}, name)),
            element("dd", {}, value instanceof Node ? value : element("bdi", {}, value)),
          ),
        ),
    );

  /** A plain table. Columns are [heading, {number: true}?]; cells are nodes or text. */
  function dataTable(caption, columns, rows) {
    return element(
      "div",
      {class: "table-scroll", tabindex: 0, role: "region", "aria-label": caption},
      element(
        "table",
        {class: "data"},
        element("caption", {class: "visually-hidden"}, caption),
        element(
          "thead",
          {},
          element(
            "tr",
            {},
            columns.map(([heading, {number} = {}]) =>
              element("th", {scope: "col", class: number ? "number" : null}, heading),
            ),
          ),
        ),
        element(
          "tbody",
          {},
          rows.map((cells) =>
            element(
              "tr",
              {},
              cells.map((cell, at) =>
                element(
                  at === 0 ? "th" : "td",
                  {scope: at === 0 ? "row" : null, class: columns[at][1]?.number ? "number" : null},
                  cell ?? "",
                ),
              ),
            ),
          ),
        ),
      ),
    );
  }

  /** The numbers behind a plot, for those who want or need them. */
  const foldedTable = (...table) => element("details", {}, element("summary", {}, "Numbers"), dataTable(...table));

  const withInterval = (value, interval, bounded) => [
    showScore(value, bounded),
    " ",
    element("span", {class: "interval"}, showInterval(interval, bounded)),
  ];

  function marksOf(score) {
    return [
      score.limit ? element("span", {class: "tag"}, "† limited: ", element("bdi", {}, score.limit)) : null,
      score.conflict ? element("span", {class: "tag warn"}, "≠ runs differ") : null,
      (score.notes ?? []).map((text) => element("span", {class: "tag"}, "* ", element("bdi", {}, text))),
    ];
  }

  function compareWith(board, model) {
    const select = element(
      "select",
      {
        id: "compare-with",
        on: {change: () => select.value && (location.hash = address("compare", [model.id, select.value]))},
      },
      element("option", {value: ""}, "choose a model"),
      board.models
        .filter((other) => other !== model)
        .map((other) =>
          element("option", {value: other.id}, [clip(other.name, 70), modelDetails(other)].filter(Boolean).join(", ")),
        ),
    );
    return board.models.length > 1
      ? element("p", {class: "inline-field"}, element("label", {for: "compare-with"}, "Compare with "), select)
      : null;
  }

  function lossSection(board, model) {
    const rows = board.losses.filter((loss) => loss.model === model.id);
    if (!rows.length)
      return section("Pretraining loss", element("p", {class: "muted"}, "No result has a loss of this model."));
    const metric = (value) =>
      value && value[0] !== null
        ? [
            fixed(value[0], 4),
            value[1] === null
              ? element("span", {class: "interval"}, " no interval")
              : element("span", {class: "interval"}, ` ± ${(1.96 * value[1]).toFixed(4)}`),
          ]
        : "";
    return section(
      "Pretraining loss",
      dataTable(
        "Losses",
        [
          ["Text"],
          ["Bits per byte", {number: true}],
          ["Nats per token", {number: true}],
          ["Tokens", {number: true}],
          ["Tokenizer"],
          [visuallyHidden("Remarks")],
        ],
        rows.map((loss) => [
          [
            loss.text.startsWith("excess/") ? "Excess over the language's entropy: " : "",
            element("bdi", {}, loss.text_label),
          ],
          metric(loss.bits_per_byte),
          metric(loss.nats_per_token),
          loss.num_tokens ? showCount(loss.num_tokens) : "",
          loss.tokenizer ? element("code", {}, loss.tokenizer.slice(0, 12)) : "",
          marksOf(loss),
        ]),
      ),
      element(
        "p",
        {class: "muted small"},
        "Bits per byte compare between tokenizers; nats per token do not. ± is 1.96 standard errors.",
      ),
    );
  }

  function tasksSection(scores, signal) {
    if (!scores.length) return section("Tasks", element("p", {class: "muted"}, "No task has a result of this model."));
    const bounded = scores.filter(
      ({of, metrics}) => of.bounded && metrics[of.metric]?.[0] !== null && metrics[of.metric],
    );
    const labels = uniqueLabels(bounded, ({of, limit}) => of.label + (limit ? " †" : ""));
    const chart = bounded.length
      ? figure({
          title: "All tasks",
          note: "95 % intervals; the grey mark is chance",
          signal,
          describe: `Scores of ${plural(bounded.length, "task")} with their intervals; the table below has the same numbers.`,
          draw: (width) => {
            const left = Math.min(230, width * 0.42);
            const kinds = [...new Set(bounded.map(({of}) => of.kind))];
            return [
              kinds.length > 1 ? swatches(kinds.map((kind) => [kind, kindColour(kind)])) : null,
              Plot.plot({
                ...plotOptions(width, 60 + 20 * bounded.length),
                marginLeft: left,
                marginTop: 8,
                x: axisBelow("Score, %", {grid: true, domain: [0, 100]}),
                y: rowNames(labels, left),
                marks: [
                  Plot.ruleY(bounded, {y: (_, at) => labels[at], strokeOpacity: 0.08}),
                  Plot.tickX(
                    bounded.filter(({of}) => of.chance !== null && of.chance !== undefined),
                    {
                      x: ({of}) => 100 * of.chance,
                      y: (score) => labels[bounded.indexOf(score)],
                      stroke: "currentColor",
                      strokeOpacity: 0.45,
                      inset: 3,
                    },
                  ),
                  Plot.ruleY(
                    bounded.filter(({interval}) => interval),
                    {
                      y: (score) => labels[bounded.indexOf(score)],
                      x1: ({interval}) => 100 * interval[0],
                      x2: ({interval}) => 100 * interval[1],
                      stroke: ({of}) => kindColour(of.kind),
                      strokeWidth: 2,
                      strokeOpacity: 0.7,
                    },
                  ),
                  Plot.dot(bounded, {
                    x: ({of, metrics}) => 100 * metrics[of.metric][0],
                    y: (_, at) => labels[at],
                    r: 4,
                    fill: ({of, limit}) => (limit ? "var(--surface)" : kindColour(of.kind)),
                    stroke: ({of}) => kindColour(of.kind),
                    strokeWidth: 1.5,
                    title: ({of, metrics, interval}) =>
                      `${of.label}\n${showScore(metrics[of.metric][0], true)} ${showInterval(interval, true)}`,
                    tip: true,
                  }),
                ],
              }),
            ].filter(Boolean);
          },
        })
      : null;
    return section(
      "Tasks",
      chart,
      dataTable(
        "Scores of all tasks",
        [
          ["Task"],
          ["Metric"],
          ["Score", {number: true}],
          ["Chance", {number: true}],
          ["Documents", {number: true}],
          ["Runs", {number: true}],
          [visuallyHidden("Remarks")],
        ],
        scores.map((score) => {
          const metric = score.metrics[score.of.metric];
          return [
            link(address("task", [score.column]), score.of.label),
            score.of.metric,
            metric && metric[0] !== null ? withInterval(metric[0], score.interval ?? null, score.of.bounded) : "",
            score.of.chance === null || score.of.chance === undefined ? "" : percent(score.of.chance),
            score.num_documents ? showCount(score.num_documents) : "",
            score.runs?.length ?? "",
            marksOf(score),
          ];
        }),
      ),
      conflicts(scores),
    );
  }

  /** Ordinal scales merge equal labels, which would lay one model's tasks over each other. */
  function uniqueLabels(items, label) {
    const seen = new Map();
    return items.map((item) => {
      const text = label(item);
      const count = (seen.get(text) ?? 0) + 1;
      seen.set(text, count);
      return count > 1 ? `${text} (${count})` : text;
    });
  }

  function conflicts(scores) {
    const differing = scores.filter(({conflict}) => conflict);
    return differing.length
      ? element(
          "div",
          {class: "notice"},
          element(
            "p",
            {},
            "Runs of one configuration that found different numbers. The table shows the latest; all are here.",
          ),
          dataTable(
            "Conflicting runs",
            [["Task"], ["Date"], ["Score", {number: true}], ["File"]],
            differing.flatMap((score) =>
              score.runs.map((run) => {
                const metric = run.metrics?.[score.of.metric];
                return [
                  score.of.label,
                  run.date ? showDate(run.date) : "",
                  metric && metric[0] !== null
                    ? [
                        showScore(metric[0], score.of.bounded),
                        element(
                          "span",
                          {class: "interval"},
                          metric[1] === null
                            ? " no standard error"
                            : ` ± ${showScore(1.96 * metric[1], score.of.bounded)}`,
                        ),
                      ]
                    : "",
                  element("code", {class: "break"}, run.source),
                ];
              }),
            ),
          ),
        )
      : null;
  }

  function promptsSection(scores, signal) {
    const swept = scores.filter(({prompts}) => (prompts?.length ?? 0) > 1);
    if (!swept.length) return null;
    const points = [];
    const labels = uniqueLabels(swept, ({of, limit}) => of.label + (limit ? " †" : ""));
    const spreads = swept
      .map((score, at) => {
        const metric = score.prompts.some(({metrics}) => metrics?.acc !== undefined) ? "acc" : score.of.metric;
        const of = score.prompts
          .map(({name, metrics, intervals}) => ({
            label: labels[at],
            kind: score.of.kind,
            name,
            value: metrics?.[metric],
            interval: intervals?.[metric],
          }))
          .filter(({value}) => value !== undefined && value !== null);
        points.push(...of);
        const values = of.map(({value}) => value);
        return {
          score,
          metric,
          of,
          mean: values.reduce((sum, value) => sum + value, 0) / values.length,
          low: Math.min(...values),
          high: Math.max(...values),
        };
      })
      .filter(({of}) => of.length);
    if (!points.length) return null;
    return section(
      "Spread over prompts",
      figure({
        title: "Accuracy of each prompt",
        note: "a dot is a prompt, the bar their mean",
        signal,
        describe: `Accuracies of the prompts of ${plural(spreads.length, "task")}; the table below has the same numbers.`,
        draw: (width) => {
          const left = Math.min(230, width * 0.42);
          return Plot.plot({
            ...plotOptions(width, 60 + 22 * spreads.length),
            marginLeft: left,
            marginTop: 8,
            x: axisBelow("Accuracy, %", {grid: true}),
            y: rowNames(labels, left),
            marks: [
              Plot.ruleY(spreads, {
                y: ({of}) => of[0].label,
                x1: ({low}) => 100 * low,
                x2: ({high}) => 100 * high,
                strokeOpacity: 0.3,
              }),
              Plot.tickX(spreads, {x: ({mean}) => 100 * mean, y: ({of}) => of[0].label, strokeWidth: 2, inset: 3}),
              Plot.dot(points, {
                x: ({value}) => 100 * value,
                y: "label",
                r: 4,
                fill: ({kind}) => kindColour(kind),
                fillOpacity: 0.75,
                stroke: "var(--surface)",
                strokeWidth: 0.75,
                title: ({name, value, interval}) =>
                  `${name}\n${percent(value)}${interval ? ` ${showInterval(interval, true)}` : ""}`,
                tip: true,
              }),
            ],
          });
        },
      }),
      dataTable(
        "Prompts of each task",
        [
          ["Task"],
          ["Prompts", {number: true}],
          ["Mean", {number: true}],
          ["Worst", {number: true}],
          ["Best", {number: true}],
          ["Best prompt"],
        ],
        spreads.map(({score, of, mean, low, high}) => [
          link(address("task", [score.column]), score.of.label),
          of.length,
          percent(mean),
          percent(low),
          percent(high),
          element("bdi", {}, of.find(({value}) => value === high).name),
        ]),
      ),
    );
  }

  function layersSection(scores, signal) {
    const curves = scores.flatMap((score) =>
      (score.prompts ?? [])
        .filter(({layers}) => layers?.length > 1)
        .map((prompt) => ({
          label:
            (score.prompts.length > 1 ? `${score.of.label}, ${prompt.name}` : score.of.label) +
            (score.limit ? " †" : ""),
          layers: prompt.layers.map(([layer, accuracy, validation]) => ({layer, accuracy, validation})),
        })),
    );
    if (!curves.length) return null;
    const labels = uniqueLabels(curves, ({label}) => label);
    const points = curves.flatMap(({layers}, at) => layers.map((point) => ({...point, label: labels[at]})));
    const palette = PALETTE;
    return section(
      "Layers",
      figure({
        title: "Accuracy of a probe on each layer",
        note: curves.length > palette.length ? "" : "dashed: cross-validation on the training documents",
        signal,
        describe: `Accuracy by layer for ${plural(curves.length, "probe")}; the table below has the same numbers.`,
        draw: (width) => [
          swatches(labels.map((label, at) => [clip(label, 60), palette[at % palette.length]])),
          Plot.plot({
            ...plotOptions(width, 300),
            x: axisBelow("Layer", {
              tickFormat: "d",
              ticks: Math.min(12, Math.max(...points.map(({layer}) => layer))),
            }),
            y: {label: "↑ Accuracy, %", labelArrow: "none", grid: true, nice: true},
            color: {type: "categorical", domain: labels, range: palette},
            marks: [
              Plot.lineY(
                points.filter(({validation}) => validation !== null),
                {
                  x: "layer",
                  y: ({validation}) => 100 * validation,
                  stroke: "label",
                  strokeDasharray: "3 3",
                  strokeOpacity: 0.7,
                },
              ),
              Plot.lineY(
                points.filter(({accuracy}) => accuracy !== null),
                {
                  x: "layer",
                  y: ({accuracy}) => 100 * accuracy,
                  stroke: "label",
                  marker: "circle",
                  strokeWidth: 2,
                  title: ({label, layer, accuracy}) => `${label}\nlayer ${layer}: ${percent(accuracy)}`,
                  tip: true,
                },
              ),
            ],
          }),
        ],
      }),
      foldedTable(
        "Accuracy by layer",
        [
          ["Probe"],
          ["Layer", {number: true}],
          ["Accuracy, %", {number: true}],
          ["Cross-validation, %", {number: true}],
        ],
        points.map(({label, layer, accuracy, validation}) => [
          label,
          layer,
          accuracy === null ? "" : percent(accuracy),
          validation === null ? "" : percent(validation),
        ]),
      ),
    );
  }

  function flatnessSection(board, all, signal) {
    if (!all.length)
      return section("Flatness", element("p", {class: "muted"}, "No result has the flatness of this model."));
    return section(
      "Flatness",
      all.map((of) => {
        const label = board.columnById.get(of.column)?.label ?? of.column;
        const measures = Object.entries(of.measures).filter(([, [value]]) => value !== null);
        return element(
          "div",
          {class: "part"},
          element("h3", {}, element("bdi", {}, label), " ", marksOf(of)),
          dataTable(
            `Flatness, ${label}`,
            [["Measure"], ["Value", {number: true}], ["95 % interval", {number: true}]],
            measures.map(([name, [value, stderr]]) => [
              measureName(name),
              significant(value, 4),
              element(
                "span",
                {class: "interval"},
                stderr === null
                  ? "no interval"
                  : `[${significant(value - 1.96 * stderr, 4)}, ${significant(value + 1.96 * stderr, 4)}]`,
              ),
            ]),
          ),
          of.parts.length ? partsFigure(of.parts, label, signal) : null,
        );
      }),
      element("p", {class: "muted small"}, "Smaller is flatter."),
    );
  }

  function partsFigure(parts, label, signal) {
    const measures = [...new Set(parts.flatMap(({traces}) => Object.keys(traces)))];
    const layers = [...new Set(parts.map(({layer}) => layer))].sort((a, b) => a - b);
    const kinds = [...new Set(parts.map(({kind}) => kind))].sort();
    const name = (layer) => (layer < 0 ? "outside" : String(layer));
    const select = element(
      "select",
      {"aria-label": "Measure", on: {change: () => chart.redraw()}},
      measures.flatMap((measure) => [
        element("option", {value: measure}, measureName(measure)),
        element("option", {value: `/${measure}`}, `${measureName(measure)}, per parameter`),
      ]),
    );
    const chart = figure({
      title: null,
      signal,
      describe: `Trace by layer and kind of module, ${label}; the table below has the same numbers.`,
      draw: (width) => {
        const measure = select.value.replace(/^\//, "");
        const perParameter = select.value.startsWith("/");
        const cells = parts
          .filter(({traces}) => Number.isFinite(traces[measure]))
          .map((part) => ({...part, value: part.traces[measure] / (perParameter ? part.size : 1)}));
        const color = flatnessScale(
          cells.map(({value}) => value),
          "",
        );
        const left = Math.min(170, width * 0.36);
        return [
          rampLegend(
            {...color, label: `${measureName(measure)}${perParameter ? " per parameter" : ""}`},
            Math.min(width, 320),
          ),
          Plot.plot({
            ...plotOptions(width, 66 + 22 * kinds.length),
            marginLeft: left,
            marginTop: 6,
            x: axisBelow("Layer", {
              domain: layers.map(name),
              tickSize: 0,
              type: "band",
              padding: 0.06,
              tickFormat: (text, at) =>
                text === "outside"
                  ? width / layers.length > 34
                    ? "outside"
                    : "–"
                  : layers.length > 20 && at % 2
                    ? ""
                    : text,
            }),
            y: {
              label: null,
              domain: kinds,
              tickSize: 0,
              padding: 0.08,
              tickFormat: (kind) => clip(kind, Math.floor(left / 7.4)),
            },
            color,
            marks: [
              Plot.cell(cells, {
                x: ({layer}) => name(layer),
                y: "kind",
                fill: "value",
                tip: true,
                title: ({layer, kind, value, size}) =>
                  `${kind}, ${layer < 0 ? "outside layers" : `layer ${layer}`}\n${significant(value)}\n${showCount(size)} parameters`,
              }),
            ],
          }),
        ];
      },
    });
    return element(
      "div",
      {},
      element("p", {class: "inline-field"}, "Trace by module: ", select),
      chart,
      foldedTable(
        "Trace by module",
        [
          ["Module"],
          ["Layer", {number: true}],
          ["Parameters", {number: true}],
          ...measures.map((measure) => [measureName(measure), {number: true}]),
        ],
        parts.map(({layer, kind, size, traces}) => [
          element("bdi", {}, kind),
          name(layer),
          showCount(size),
          ...measures.map((measure) => (Number.isFinite(traces[measure]) ? significant(traces[measure], 4) : "")),
        ]),
      ),
    );
  }

  function labSection(lab) {
    if (!lab) return null;
    const settings = (mapping) =>
      Object.entries(mapping)
        .map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`)
        .join(", ");
    return section(
      "Training in the lab",
      definitions([
        ["Run", lab.run],
        ["Language", `${lab.language} ${lab.language_sha256.slice(0, 12)}`],
        ["Algorithm", lab.algorithm],
        ["Its settings", settings(lab.algorithm_settings)],
        ["Objective", lab.objective],
        ["Architecture", settings(lab.architecture)],
        ["Seed", lab.seed === null ? null : String(lab.seed)],
        ["Step", lab.step === null ? null : showCount(lab.step)],
        ["Tokens seen", lab.tokens_seen === null ? null : showCount(lab.tokens_seen)],
      ]),
    );
  }

  function provenanceSection(model, scores) {
    // A file has one command line as a rule, for all its tasks.
    const files = new Map();
    for (const {runs = [], of} of scores)
      for (const run of runs) {
        if (!files.has(run.source)) files.set(run.source, {...run, commands: new Map()});
        const {commands} = files.get(run.source);
        if (!commands.has(run.command)) commands.set(run.command, []);
        commands.get(run.command).push(of.label);
      }
    const tasks = (labels) =>
      element(
        "p",
        {class: "small"},
        `${plural(labels.length, "task")}: `,
        labels.slice(0, 8).map((label, at) => [at ? ", " : "", element("bdi", {}, label)]),
        labels.length > 8 ? ", …" : "",
      );
    return section(
      "Provenance",
      definitions([
        ["Model", model.name],
        ["Revision", model.revision],
        ["Commit", model.sha && element("code", {}, model.sha)],
        ["dtype", model.dtype],
        ["Backend", model.backend],
        ["Chat template", model.chat_template],
        ["System instruction", model.system_instruction],
        ...model.model_args.map(([name, value]) => [name, value]),
      ]),
      [...files.values()]
        .sort((a, b) => (b.date ?? 0) - (a.date ?? 0) || (a.source < b.source ? -1 : 1))
        .map((run) =>
          element(
            "article",
            {class: "run"},
            element("h3", {class: "break"}, element("code", {}, run.source)),
            element(
              "p",
              {class: "muted small"},
              [
                run.date ? showDate(run.date) : null,
                ...Object.entries(run.versions ?? {}).map(([name, version]) => `${name} ${version}`),
              ]
                .filter(Boolean)
                .join(" · "),
              run.copies?.length ? ` · same bytes as ${run.copies.join(", ")}` : "",
            ),
            tasks([...run.commands.values()].flat()),
            commands([...run.commands.keys()].filter(Boolean)),
          ),
        ),
    );
  }

  function commands(lines) {
    if (!lines.length) return null;
    const block = commandBlock(lines.join("\n"));
    return lines.length <= 3
      ? block
      : element("details", {}, element("summary", {}, `${lines.length} command lines`), block);
  }

  function commandBlock(command) {
    const button = element(
      "button",
      {
        type: "button",
        class: "button copy",
        on: {
          click: async () => {
            try {
              await navigator.clipboard.writeText(command);
              button.textContent = "Copied";
            } catch {
              getSelection().selectAllChildren(text);
              button.textContent = "Selected: copy it";
            }
            announce(button.textContent);
          },
        },
      },
      "Copy",
    );
    const text = element("pre", {class: "code", tabindex: 0, "aria-label": "Command line to repeat the run"}, command);
    return element("div", {class: "command"}, text, button);
  }

  return {showModel, dataTable, definitions, section, marksOf};
})();
