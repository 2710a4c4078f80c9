// A table that sorts by its headers and filters by words. It shows some rows and a button for more: ten thousand rows
// of a table are slow to lay out, and nobody reads them.

const ROWS_AT_ONCE = 50;
const UNLABELLED = ["size", "tensor", "module"]; // areas that say by themselves what they are
let tableCount = 0;
// Of texts with numbers: layers.2 comes before layers.10.
const ORDER = new Intl.Collator("en", { numeric: true });

/** A column that sorts as text; `show` makes what is seen of it, the text itself unless said. */
function textColumn(label, area, value, show = (row) => makePath(value(row))) {
  return { label, area, kind: "text", value, show };
}

/** A column that sorts as numbers, the largest first. */
function numberColumn(label, value, format, area = "") {
  return { label, area, kind: "number", value, show: (row) => format(value(row), row) };
}

/**
 * columns: as the makers above give them; `area` is a word for the style sheet.
 * sort: [column, 1 or -1]. limit: how many rows are shown at first.
 * search(row): the text in which words are looked for. choices: {label, values, of(row)}.
 * total(found, all): what is said of the rows that are found. empty: what is said where there are none at all.
 */
class SortedTable {
  constructor(root, { caption, rows, columns, empty, sort = [0, -1], limit = ROWS_AT_ONCE, search, choices, total }) {
    Object.assign(this, { rows, columns, search, choices, total, empty, limit, first: limit });
    [this.sortColumn, this.direction] = sort;
    this.words = [];
    this.choice = "";
    this.haystacks = new Map();
    tableCount += 1;
    this.head = make("tr", { role: "row" }, ...columns.map((column, at) => this.makeHeader(column, at)));
    this.body = make("tbody", { role: "rowgroup" });
    this.status = make("p", { class: "status", role: "status" });
    this.more = make("button", { type: "button", class: "quiet", onclick: () => this.showMore() });
    const table = make(
      "table",
      { role: "table" },
      make("caption", { class: "unseen" }, caption),
      make("thead", { role: "rowgroup" }, this.head),
      this.body,
    );
    root.append(
      ...(search || choices ? [this.makeFilter()] : []),
      make("div", { class: "table" }, table),
      make("p", { class: "more" }, this.more),
    );
    this.show();
  }

  // The roles say again what the elements are: on a narrow screen the style sheet lays rows out as blocks, and browsers
  // then no longer take them for rows.
  makeHeader(column, at) {
    const sort = () => {
      this.direction = this.sortColumn === at ? -this.direction : column.kind === "number" ? -1 : 1;
      this.sortColumn = at;
      this.show();
    };
    const button = make("button", { type: "button", onclick: sort }, column.label);
    return make("th", { scope: "col", role: "columnheader", class: this.classOf(column) }, button);
  }

  makeFilter() {
    const id = `filter-${tableCount}`;
    const parts = [];
    if (this.search) {
      this.input = make("input", {
        type: "search",
        id,
        placeholder: "module, op or line",
        autocomplete: "off",
        spellcheck: "false",
        oninput: oncePerFrame(() => this.filter(this.input.value)),
      });
      parts.push(make("div", { class: "field" }, make("label", { for: id }, "Filter"), this.input));
    }
    if (this.choices) {
      const options = this.choices.values.map((value) => make("option", { value }, value));
      const choose = (event) => {
        this.choice = event.target.value;
        this.limit = this.first;
        this.show();
      };
      const all = make("option", { value: "" }, "all");
      const select = make("select", { id: `${id}-choice`, onchange: choose }, all, ...options);
      parts.push(make("div", { class: "field" }, make("label", { for: `${id}-choice` }, this.choices.label), select));
    }
    return make("div", { class: "filter" }, ...parts, this.status);
  }

  /** Shows rows that have every one of the words; also what the tree map calls to list a module's tensors. */
  filter(text) {
    this.words = text.toLowerCase().split(/\s+/u).filter(Boolean);
    this.limit = this.first;
    if (this.input && this.input.value !== text) this.input.value = text;
    this.show();
  }

  matches(row) {
    if (this.choice && this.choices.of(row) !== this.choice) return false;
    if (!this.words.length) return true;
    let haystack = this.haystacks.get(row);
    if (haystack === undefined) {
      haystack = this.search(row).toLowerCase();
      this.haystacks.set(row, haystack);
    }
    return this.words.every((word) => haystack.includes(word));
  }

  showMore() {
    const first = this.limit;
    this.limit += 10 * ROWS_AT_ONCE;
    this.show();
    this.body.rows[first]?.scrollIntoView({ block: "nearest" });
  }

  show() {
    const column = this.columns[this.sortColumn];
    const compare =
      column.kind === "number"
        ? (one, other) => column.value(one) - column.value(other)
        : (one, other) => ORDER.compare(column.value(one), column.value(other));
    const found = this.rows.filter((row) => this.matches(row));
    found.sort((one, other) => this.direction * compare(one, other));
    this.body.replaceChildren(...found.slice(0, this.limit).map((row) => this.makeRow(row)));
    if (!found.length) {
      const text = this.rows.length ? "Nothing matches." : this.empty;
      const cell = make("td", { role: "cell", colspan: this.columns.length, class: "nothing" }, text);
      this.body.append(make("tr", { role: "row" }, cell));
    }
    [...this.head.children].forEach((cell, at) => {
      if (at !== this.sortColumn) cell.removeAttribute("aria-sort");
      else cell.setAttribute("aria-sort", this.direction > 0 ? "ascending" : "descending");
    });
    const left = found.length - this.limit;
    this.more.parentElement.hidden = left <= 0;
    this.more.textContent = `Show more (${formatCount(left)} left)`;
    this.status.textContent = this.total ? this.total(found, this.rows) : "";
  }

  makeRow(row) {
    const cell = (column) => {
      const label = UNLABELLED.includes(column.area) ? null : column.label; // seen where rows are blocks
      return make("td", { role: "cell", class: this.classOf(column), "data-label": label }, column.show(row));
    };
    return make("tr", { role: "row" }, ...this.columns.map(cell));
  }

  classOf(column) {
    return `${column.kind} ${column.area ?? ""}`.trim();
  }
}
