// Does flatness predict downstream scores where loss does not?
"use strict";

const {showFindings} = (() => {
  const COEFFICIENTS = [
    ["loss_downstream", "loss with score", "var(--natural)"],
    ["flatness_downstream", "flatness with score", "var(--probe)"],
    ["flatness_given_loss", "flatness with score, given loss", "var(--quad)"],
    ["flatness_within_groups", "flatness with score, within loss groups", "var(--kernel)"],
  ];

  function showFindings(page, {board, signal}) {
    const all = board.index.correlations;
    fill(
      page,
      element("h1", {}, "Does flatness predict downstream scores where loss does not?"),
      element(
        "p",
        {class: "lede"},
        "Spearman's rank correlations over models, with bootstrap intervals and permutation p-values. Less loss and less curvature should go with higher scores, so a prediction that holds is negative. A trace is a sum over parameters: flatness is correlated over models of one size, the commonest, only; within loss groups, where scores differ by more than their errors only.",
      ),
    );
    if (!all.length) {
      page.append(
        element(
          "p",
          {class: "notice"},
          "Not yet known: it takes at least a few models that have a loss, a flatness and a score on one task.",
        ),
      );
      return "Loss and flatness";
    }
    const rank = (text) => board.axes.findIndex((axis) => axis.text === text);
    const texts = [
      ...new Map(
        all.map(({text}) => [text, board.losses.find((loss) => loss.text === text)?.text_label ?? text]),
      ).entries(),
    ].sort(([a], [b]) => rank(a) - rank(b));
    const measures = [
      ...new Map(
        all.map(({flatness_column: column, flatness_measure: measure}) => [
          `${column}.${measure}`,
          `${measureName(measure)}, ${board.columnById.get(column)?.label ?? column}`,
        ]),
      ).entries(),
    ];
    const host = element("div");
    const choice = (label, id, options) => {
      const select = element(
        "select",
        {id, on: {change: paint}},
        options.map(([value, text]) => element("option", {value}, text)),
      );
      return [select, element("div", {class: "field grow"}, element("label", {for: id}, label), select)];
    };
    const [text, textField] = choice("Loss of", "finding-text", texts);
    const [measure, measureField] = choice("Flatness", "finding-measure", measures);
    page.append(element("div", {class: "control-row"}, textField, measureField), host);

    const show = (coefficient) =>
      !coefficient
        ? ""
        : coefficient.value === null
          ? element("span", {class: "muted small"}, coefficient.reason ?? "not known")
          : [
              fixed(coefficient.value, 2),
              " ",
              element(
                "span",
                {class: "interval"},
                coefficient.low === null
                  ? "no interval"
                  : `[${fixed(coefficient.low, 2)}, ${fixed(coefficient.high, 2)}]`,
                coefficient.p_value === null
                  ? ""
                  : `, p ${coefficient.p_value < 0.001 ? "< 0.001" : coefficient.p_value.toFixed(3)}`,
              ),
            ];

    function paint() {
      const chosen = all.filter(
        (one) => one.text === text.value && `${one.flatness_column}.${one.flatness_measure}` === measure.value,
      );
      const label = (one) => board.columnById.get(one.downstream)?.label ?? one.downstream;
      const points = chosen
        .flatMap((one) =>
          COEFFICIENTS.map(([key, name]) => ({id: one.downstream, label: label(one), name, ...one[key]})),
        )
        .filter(({value}) => typeof value === "number");
      const names = new Map(chosen.map((one) => [one.downstream, label(one)]));
      const ids = [...new Set(points.map(({id}) => id))];
      fill(
        host,
        points.length
          ? figure({
              title: null,
              signal,
              describe: "Rank correlations with intervals for each task; the table below has the same numbers.",
              draw: (width) => {
                const left = Math.min(230, width * 0.4);
                const color = {
                  type: "categorical",
                  domain: COEFFICIENTS.map(([, name]) => name),
                  range: COEFFICIENTS.map(([, , colour]) => colour),
                };
                return [
                  swatches(COEFFICIENTS.map(([, name, colour]) => [name, colour])),
                  Plot.plot({
                    ...plotOptions(width, 70 + 54 * ids.length),
                    marginLeft: left,
                    marginTop: 8,
                    x: axisBelow("Rank correlation", {
                      domain: [-1, 1],
                      grid: true,
                      tickFormat: (value) => String(value).replace("-", MINUS),
                    }),
                    fy: {
                      domain: ids,
                      label: null,
                      axis: "left",
                      tickSize: 0,
                      tickFormat: (id) => clip(names.get(id), Math.floor(left / 7.4)),
                      padding: 0.15,
                    },
                    y: {domain: COEFFICIENTS.map(([, name]) => name), axis: null, type: "band"},
                    color,
                    marks: [
                      Plot.ruleX([0], {strokeOpacity: 0.6}),
                      Plot.ruleY(
                        points.filter(({low}) => low !== null),
                        {
                          fy: "id",
                          y: "name",
                          x1: "low",
                          x2: "high",
                          stroke: "name",
                          strokeWidth: 2,
                          strokeOpacity: 0.7,
                        },
                      ),
                      Plot.dot(points, {fy: "id", y: "name", x: "value", fill: "name", r: 4}),
                    ],
                  }),
                ];
              },
            })
          : null,
        dataTable(
          "Rank correlations",
          [
            ["Task"],
            ["Models", {number: true}],
            ["Of one size", {number: true}],
            ...COEFFICIENTS.map(([, name]) => [name.replace(/^./, (letter) => letter.toUpperCase()), {number: true}]),
          ],
          chosen.map((one) => [
            link(address("task", [one.downstream]), label(one)),
            one.models,
            one.comparable,
            ...COEFFICIENTS.map(([key]) => show(one[key])),
          ]),
        ),
      );
    }
    paint();
    return "Loss and flatness";
  }

  return {showFindings};
})();
