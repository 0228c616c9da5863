// Loss and downstream score of each model, coloured by flatness; dragging over it selects rows of the table.
"use strict";

const {makeScatter} = (() => {
  function makeScatter(host, {board, state, derived, shown, signal, update}) {
    if (!board.axes.length) {
      fill(
        host,
        element(
          "p",
          {class: "notice"},
          "No model has a loss yet, so none can be matched: evaluate one with --tasks loss_wikitext.",
        ),
      );
      return {schedule() {}};
    }
    const legendHost = element("div", {class: "scatter-legend"});
    const note = element("p", {class: "muted small"});
    const inputs = ["Loss from", "Loss to", "Score from", "Score to"].map((name) =>
      element("input", {
        type: "number",
        step: "any",
        class: "short",
        "aria-label": name,
        on: {change: () => fromInputs()},
      }),
    );
    const clear = element(
      "button",
      {
        type: "button",
        class: "button quiet",
        on: {
          click: () => {
            state.brush = null;
            update();
          },
        },
      },
      "Clear selection",
    );
    const plot = figure({title: null, describe: "", signal, draw});
    const details = element(
      "details",
      {
        class: "scatter",
        open: state.plot,
        on: {
          toggle: () => {
            state.plot = details.open;
            update();
          },
        },
      },
      element("summary", {}, "Loss and downstream score, coloured by flatness"),
      legendHost,
      plot,
      element(
        "div",
        {class: "brush-row"},
        element(
          "span",
          {class: "muted"},
          "Drag over the plot, or type, to select rows; click a point to open its model.",
        ),
        element("span", {class: "pair"}, "loss", inputs[0], "–", inputs[1]),
        element("span", {class: "pair"}, "score", inputs[2], "–", inputs[3]),
        clear,
      ),
      note,
    );
    fill(host, details);

    const percentScale = () => (derived().column ? derived().column.bounded : true);

    function fromInputs() {
      const values = inputs.map((input) => (input.value === "" ? null : input.valueAsNumber));
      const scale = percentScale() ? 100 : 1;
      const [x0, x1, y0, y1] = values;
      state.brush = values.every((value) => value === null)
        ? null
        : [x0 ?? -1e9, x1 ?? 1e9, y0 === null ? -1e9 : y0 / scale, y1 === null ? 1e9 : y1 / scale];
      update();
    }

    function showBrush() {
      const scale = percentScale() ? 100 : 1;
      const values = state.brush ?? [null, null, null, null];
      inputs.forEach((input, at) => {
        const value = values[at];
        input.value =
          value === null || Math.abs(value) >= 1e9 ? "" : Number((at < 2 ? value : value * scale).toPrecision(4));
      });
      clear.disabled = !state.brush;
    }

    function draw(width) {
      const {rows, groups, column} = derived();
      const bounded = percentScale();
      const scale = bounded ? 100 : 1;
      const points = rows.filter((row) => row.loss && row.downstream);
      const visible = shown();
      const name = column ? `${column.label}, ${column.metric}` : "Mean of shown tasks, 0 = chance";
      plot.canvas.setAttribute(
        "aria-label",
        `Scatter plot of ${plural(points.length, "model")}: loss in ${state.axis.unit} against ${name}. The table below has the same numbers.`,
      );
      const without = rows.length - points.length;
      note.textContent = [
        without
          ? `${plural(without, "model")} without both a loss and a ${column ? "score" : "score on every shown task"} ${without === 1 ? "is" : "are"} not drawn.`
          : null,
        groups.length ? "Shaded: loss groups." : null,
        points.some((row) => !row.flatness) ? "Hollow: flatness is not known." : null,
      ]
        .filter(Boolean)
        .join(" ");
      legendHost.hidden = !points.some((row) => row.flatness);
      if (!points.length) {
        return element(
          "p",
          {class: "notice"},
          "No model has both a loss and this score. Show fewer tasks, or choose one under Downstream.",
        );
      }
      const color = flatnessScale(
        points.map((row) => row.flatness?.value ?? NaN),
        state.flatness ? measureName(state.flatness.measure) : "",
      );
      fill(
        legendHost,
        !legendHost.hidden
          ? rampLegend(
              {...color, label: `Flatness: ${state.flatness.label} (smaller is flatter)`},
              Math.min(width, 360),
            )
          : null,
      );
      const bars = points.length <= 250;
      const options = plotOptions(width, width < 560 ? 300 : 400);
      const x = (row) => row.loss.value;
      const y = (row) => scale * row.downstream.value;
      const faded = (row) => (visible.has(row.place) ? 1 : 0.12);
      const low = (row) => scale * (row.downstream.interval?.[0] ?? row.downstream.value);
      const high = (row) => scale * (row.downstream.interval?.[1] ?? row.downstream.value);
      const drawing = Plot.plot({
        ...options,
        x: {
          label: `Loss, ${state.axis.unit} →`,
          nice: true,
          grid: true,
          labelAnchor: "center",
          labelArrow: "none",
          labelOffset: 40,
        },
        y: {label: bounded ? `↑ ${name}, %` : `↑ ${name}`, nice: true, grid: true, labelArrow: "none"},
        color,
        marks: [
          Plot.rect(groups, {
            x1: "low",
            x2: "high",
            fill: "currentColor",
            fillOpacity: 0.07,
            stroke: "currentColor",
            strokeOpacity: 0.18,
          }),
          bars
            ? Plot.ruleX(points, {
                x,
                y1: low,
                y2: high,
                strokeOpacity: (row) => 0.35 * faded(row),
                stroke: "currentColor",
              })
            : null,
          bars
            ? Plot.ruleY(points, {
                y,
                x1: (row) => x(row) - 1.96 * row.loss.stderr,
                x2: (row) => x(row) + 1.96 * row.loss.stderr,
                strokeOpacity: (row) => 0.35 * faded(row),
                stroke: "currentColor",
              })
            : null,
          Plot.dot(
            points.filter((row) => row.flatness),
            {
              x,
              y,
              r: bars ? 5 : 3.5,
              fill: (row) => row.flatness.value,
              stroke: "currentColor",
              strokeOpacity: 0.55,
              strokeWidth: 0.75,
              opacity: faded,
            },
          ),
          Plot.dot(
            points.filter((row) => !row.flatness),
            {x, y, r: bars ? 4.5 : 3, stroke: "currentColor", strokeWidth: 1.2, opacity: faded},
          ),
          Plot.tip(
            points,
            Plot.pointer({
              x,
              y,
              title: (row) =>
                [
                  clip(row.model.name, 60),
                  modelDetails(row.model),
                  `loss ${fixed(row.loss.value, 4)}${row.loss.hasStderr ? ` ± ${(1.96 * row.loss.stderr).toFixed(4)}` : ""}`,
                  `score ${showScore(row.downstream.value, bounded)} ${showInterval(row.downstream.interval, bounded)}`,
                  row.flatness ? `flatness ${significant(row.flatness.value)}` : "flatness not known",
                  row.group ? `loss group ${row.group.number}` : "in no loss group",
                ]
                  .filter(Boolean)
                  .join("\n"),
            }),
          ),
        ],
      });
      addBrush(drawing, options);
      return drawing;
    }

    function addBrush(drawing, {width, height, marginLeft, marginRight, marginTop, marginBottom}) {
      const scale = percentScale() ? 100 : 1;
      const [sx, sy] = [drawing.scale("x"), drawing.scale("y")];
      const area = [
        [marginLeft, marginTop],
        [width - marginRight, height - marginBottom],
      ];
      const behaviour = d3
        .brush()
        .extent(area)
        .on("end", (event) => {
          if (!event.sourceEvent) return;
          // A click on a point opens its model, unless it is there to end a selection.
          if (!event.selection && !state.brush && drawing.value)
            return void (location.hash = address("model", [drawing.value.model.id]));
          if (!event.selection) state.brush = null;
          else {
            const [[left, top], [right, bottom]] = event.selection;
            state.brush = [sx.invert(left), sx.invert(right), sy.invert(bottom) / scale, sy.invert(top) / scale];
          }
          update();
        });
      const layer = d3.select(drawing).append("g").attr("class", "brush").call(behaviour);
      if (state.brush) {
        const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
        const [x0, x1, y0, y1] = state.brush;
        const [[left, top], [right, bottom]] = area;
        layer.call(behaviour.move, [
          [clamp(sx.apply(x0), left, right), clamp(sy.apply(y1 * scale), top, bottom)],
          [clamp(sx.apply(x1), left, right), clamp(sy.apply(y0 * scale), top, bottom)],
        ]);
      }
    }

    // The table first; the plot when that is on the screen.
    let waiting = 0;
    function schedule() {
      showBrush();
      if (waiting) return;
      waiting = requestAnimationFrame(() =>
        setTimeout(() => {
          waiting = 0;
          if (!signal.aborted && details.open) plot.redraw();
        }),
      );
    }
    return {schedule};
  }

  return {makeScatter};
})();
