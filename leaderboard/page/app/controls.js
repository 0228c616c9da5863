// Filters, the tolerance of equal loss, and which columns are shown.
"use strict";

const {makeControls} = (() => {
  let fields = 0;
  function field(label, input, extra = {}) {
    input.id ||= `field-${++fields}`;
    return element("div", {class: "field", ...extra}, element("label", {for: input.id}, label), input);
  }

  const choice = (options, selected, listener) =>
    element(
      "select",
      {on: {change: (event) => listener(event.target.value)}},
      options.map(([value, text]) => element("option", {value, selected: value === selected}, text)),
    );

  function makeControls(board, state, derived, update) {
    const numberInput = (name, placeholder, key) =>
      element("input", {
        type: "number",
        min: 0,
        step: "any",
        inputmode: "decimal",
        placeholder,
        "aria-label": name,
        value: state[key] ?? "",
        on: {
          input: (event) => {
            state[key] = event.target.value === "" ? null : Number(event.target.value);
            update();
          },
        },
      });
    const search = element("input", {
      type: "search",
      placeholder: "name, revision, dtype",
      value: state.search,
      autocomplete: "off",
      on: {
        input: (event) => {
          state.search = event.target.value.trim();
          update();
        },
      },
    });

    const familyText = element("span");
    const families = element(
      "details",
      {class: "menu"},
      element("summary", {}, familyText),
      element(
        "fieldset",
        {class: "menu-panel"},
        element("legend", {class: "visually-hidden"}, "Families"),
        board.families.map((family) =>
          element(
            "label",
            {class: "check"},
            element("input", {
              type: "checkbox",
              checked: state.families.includes(family),
              on: {
                change: (event) => {
                  state.families = event.target.checked
                    ? [...state.families, family]
                    : state.families.filter((other) => other !== family);
                  update();
                },
              },
            }),
            element("bdi", {}, family || "unknown"),
          ),
        ),
      ),
    );

    const task = choice([["", "any"], ...board.downstream.map(({id, label}) => [id, label])], state.task, (value) => {
      state.task = value;
      update();
    });
    const group = element("select", {
      on: {
        change: (event) => {
          state.group = event.target.value === "" ? null : Number(event.target.value);
          update();
        },
      },
    });

    const limited = element("input", {
      type: "checkbox",
      checked: state.limited,
      on: {
        change: (event) => {
          state.limited = event.target.checked;
          update({data: true});
        },
      },
    });

    const axis = choice(
      board.axes.map(({id, label, unit}) => [id, `${label}, ${unit}`]),
      state.axis?.id,
      (value) => {
        state.axis = board.axes.find(({id}) => id === value);
        state.tolerance = defaultTolerance(board, state.axis);
        state.brush = null;
        setRange();
        update({data: true});
      },
    );
    const slider = element("input", {
      type: "range",
      class: "tolerance",
      id: "tolerance",
      "aria-label": "Tolerance of equal loss",
      on: {input: () => setTolerance(slider.valueAsNumber)},
    });
    const exact = element("input", {
      type: "number",
      min: 0,
      step: "any",
      class: "short",
      "aria-label": "Tolerance, as a number",
      on: {change: () => exact.value !== "" && setTolerance(Math.max(0, exact.valueAsNumber))},
    });
    let frame = 0;
    function setTolerance(value) {
      state.tolerance = value;
      showTolerance();
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(() => update({data: true}));
    }
    function showTolerance() {
      slider.value = state.tolerance;
      exact.value = Number(state.tolerance.toPrecision(4));
      slider.setAttribute("aria-valuetext", `${Number(state.tolerance.toPrecision(4))} ${state.axis?.unit ?? ""}`);
    }
    function setRange() {
      const standard = defaultTolerance(board, state.axis);
      const top = 10 ** Math.ceil(Math.log10(standard * 5 || 0.1));
      slider.min = 0;
      slider.max = top;
      slider.step = top / 200;
      showTolerance();
    }

    const downstream = choice(
      [["", "mean of shown tasks"], ...board.downstream.map(({id, label}) => [id, label])],
      state.downstream ?? "",
      (value) => {
        state.downstream = value || null;
        state.brush = null;
        update({data: true});
      },
    );
    const flatness = choice(
      board.flatnessKinds.map(({id, label}) => [id, label]),
      state.flatness?.id,
      (value) => {
        state.flatness = board.flatnessKinds.find(({id}) => id === value);
        update({data: true});
      },
    );

    const columnsText = element("span", {}, "Columns");
    const boxes = new Map();
    const tick = (id, label) => {
      const box = element("input", {
        type: "checkbox",
        checked: state.columns.includes(id),
        on: {change: () => setColumns()},
      });
      boxes.set(id, box);
      return element("label", {class: "check"}, box, element("bdi", {}, label));
    };
    const order = [...META, ...board.columns.map(({id}) => id)];
    function setColumns() {
      state.columns = order.filter((id) => id === "name" || boxes.get(id)?.checked);
      update({data: true, columns: true});
    }
    const every = (value) => () => {
      for (const {id} of board.downstream) boxes.get(id).checked = value;
      setColumns();
    };
    const kinds = [...new Set(board.downstream.map(({kind}) => kind))];
    const columns = element(
      "details",
      {class: "menu right", id: "columns-menu"},
      element("summary", {}, columnsText),
      element(
        "div",
        {class: "menu-panel wide"},
        element(
          "div",
          {class: "menu-buttons"},
          element("button", {type: "button", class: "button", on: {click: every(true)}}, "All tasks"),
          element("button", {type: "button", class: "button", on: {click: every(false)}}, "No tasks"),
        ),
        element(
          "fieldset",
          {},
          element("legend", {}, "About the model"),
          META.slice(1).map((id) => tick(id, META_LABELS[id])),
        ),
        kinds.map((kind) =>
          element(
            "fieldset",
            {},
            element("legend", {}, kind),
            board.downstream.filter((column) => column.kind === kind).map((column) => tick(column.id, column.label)),
          ),
        ),
      ),
    );

    const clear = element(
      "button",
      {
        type: "button",
        class: "button quiet",
        on: {
          click: () => {
            Object.assign(state, {
              search: "",
              families: [],
              sizeLow: null,
              sizeHigh: null,
              task: "",
              group: null,
              brush: null,
            });
            search.value = task.value = "";
            for (const input of node.querySelectorAll("input[type=number]:not(.short), .menu input"))
              input.type === "checkbox" ? (input.checked = false) : (input.value = "");
            update();
          },
        },
      },
      "Clear filters",
    );

    const hasLimited = board.index.hidden.limited_scores > 0 || board.losses.some(({limit}) => limit);
    const node = element(
      "form",
      {class: "controls", "aria-label": "Filters", on: {submit: (event) => event.preventDefault()}},
      element(
        "div",
        {class: "control-row"},
        field("Search", search, {class: "field grow"}),
        element("div", {class: "field"}, element("span", {class: "as-label"}, "Family"), families),
        element(
          "div",
          {class: "field"},
          element("span", {class: "as-label"}, "Parameters, millions"),
          element(
            "span",
            {class: "pair"},
            numberInput("At least, millions of parameters", "min", "sizeLow"),
            "–",
            numberInput("At most, millions of parameters", "max", "sizeHigh"),
          ),
        ),
        field("Has a result on", task),
        board.axes.length ? field("Loss group", group) : null,
        hasLimited
          ? element(
              "div",
              {class: "field"},
              element("span", {class: "as-label"}, "Limited runs"),
              element("label", {class: "check boxed"}, limited, "show"),
            )
          : null,
        clear,
      ),
      board.axes.length
        ? element(
            "div",
            {class: "control-row"},
            field("Loss of", axis, {class: "field grow"}),
            element(
              "div",
              {class: "field tolerance-field"},
              element("label", {for: "tolerance"}, "Equal loss: within ", element("span", {class: "unit"})),
              element("span", {class: "pair"}, slider, exact),
            ),
            field("Downstream", downstream, {class: "field grow"}),
            board.flatnessKinds.length ? field("Flatness", flatness, {class: "field grow"}) : null,
          )
        : element("div", {class: "control-row"}, field("Downstream", downstream)),
    );
    if (state.axis) setRange();

    function refresh() {
      familyText.textContent =
        state.families.length === 0
          ? "all"
          : state.families.length === 1
            ? state.families[0] || "unknown"
            : `${state.families.length} families`;
      const {groups} = derived();
      fill(
        group,
        element("option", {value: ""}, groups.length ? "any" : "none at this tolerance"),
        groups.map(({number, low, high, rows}) =>
          element("option", {value: number}, `${number}: ${low.toFixed(3)}–${high.toFixed(3)}, ${rows.length} models`),
        ),
      );
      group.value = state.group ?? "";
      const unit = node.querySelector(".tolerance-field .unit");
      if (unit) unit.textContent = state.axis.unit;
      const count = board.downstream.filter(({id}) => state.columns.includes(id)).length;
      columnsText.textContent = `Columns: ${count} of ${plural(board.downstream.length, "task")}`;
      clear.disabled = !(
        state.search ||
        state.families.length ||
        state.sizeLow !== null ||
        state.sizeHigh !== null ||
        state.task ||
        state.group !== null ||
        state.brush
      );
    }

    return {node, columns, refresh};
  }

  return {makeControls};
})();
