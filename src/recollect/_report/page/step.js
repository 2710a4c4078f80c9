// A step as the page has it: columns of numbers, and what follows from them: bytes by category at each call, and what
// is alive there. The rules are those of the library's own timeline: a storage is there from the call that makes it,
// that call included, to the call at whose start it is gone.

class Step {
  constructor(data, { strings, categories, phases, families }) {
    Object.assign(this, data);
    this.strings = strings;
    this.families = new Map(families);
    this.categories = categories;
    this.phases = phases;
    this.count = data.calls.op.length;
    this.byCategory = categories.map(() => new Float64Array(this.count));
    this.totals = new Float64Array(this.count);
    this.sumUp();
    this.hasTimes = data.seconds !== null && this.count > 0;
    this.positions = { calls: Float64Array.from({ length: this.count + 1 }, (_, at) => at) };
    if (this.hasTimes) {
      this.positions.time = new Float64Array(this.count + 1);
      for (let at = 0; at < this.count; at += 1) {
        this.positions.time[at + 1] = this.positions.time[at] + (data.calls.nanoseconds[at] ?? 0) / 1e9;
      }
    }
  }

  sumUp() {
    const { size, start, end, category } = this.storages;
    const changes = this.categories.map(() => new Float64Array(this.count + 2));
    for (let at = 0; at < size.length; at += 1) {
      changes[category[at]][start[at] + 1] += size[at];
      if (end[at] !== null) changes[category[at]][Math.max(end[at], start[at]) + 1] -= size[at];
    }
    changes.forEach((change, kind) => {
      // What libraries hold, and a call's workspace, are nobody's storage.
      const isTemporary = kind === this.temporary;
      let running = change[0] + (kind === this.library ? this.fixed_bytes : 0);
      for (let at = 0; at < this.count; at += 1) {
        running += change[at + 1];
        const now = running + (isTemporary ? this.calls.workspace_bytes[at] : 0);
        this.byCategory[kind][at] = now;
        this.totals[at] += now;
      }
    });
  }

  /**
   * What is there while a call runs (before the first for -1), largest first, without the categories in `hidden`; and
   * how much is left out of the list.
   */
  aliveAt(call, most, hidden) {
    const { size, start, end, category, tensor, name } = this.storages;
    const rows = [];
    for (let at = 0; at < size.length; at += 1) {
      const isAlive = start[at] <= call && (end[at] === null || end[at] > call);
      if (isAlive && !hidden.has(category[at])) rows.push({ at, bytes: size[at] });
    }
    if (!hidden.has(this.temporary)) {
      const workspace = call >= 0 ? this.calls.workspace_bytes[call] : 0;
      if (workspace) rows.push({ at: -1, bytes: workspace, what: "workspace of this call" });
    }
    if (this.fixed_bytes && !hidden.has(this.library)) {
      rows.push({ at: -2, bytes: this.fixed_bytes, what: "always held by libraries" });
    }
    const found = this.fold(
      rows.map(({ at, bytes, what }) => ({
        bytes,
        category: at === -1 ? this.temporary : at === -2 ? this.library : category[at],
        tensor: at < 0 ? -1 : tensor[at],
        name: what ?? name[at],
        call: at < 0 ? -1 : start[at],
      })),
    );
    const rest = found.slice(most);
    const [more, moreBytes] = [counted(rest), rest.reduce((sum, row) => sum + row.bytes, 0)];
    return { rows: found.slice(0, most), more, moreBytes };
  }

  /** Tensors at the same place of identical layers as one row, with how many they are; largest first. */
  fold(rows) {
    const { op, module, source } = this.calls;
    const familyOf = (text) => this.families.get(text) ?? text;
    const folded = new Map();
    rows.forEach((row) => {
      const { call } = row;
      const maker = call < 0 ? [] : [op[call], familyOf(module[call]), source[call]];
      const name = typeof row.name === "string" ? row.name : familyOf(row.name);
      const key = [row.category, row.tensor, name, ...maker].join("\n");
      const known = folded.get(key);
      if (!known) {
        folded.set(key, { ...row, count: 1 });
        return;
      }
      known.count += 1;
      known.bytes += row.bytes;
    });
    const text = (at) => (typeof at === "string" ? at : this.strings[at]);
    const found = [...folded.values()].map((row) => {
      const [place, owner] = [row.name, row.call < 0 ? null : module[row.call]];
      const isOne = row.count === 1;
      const named = typeof place === "string" || isOne ? place : familyOf(place);
      const made = owner === null || isOne ? owner : familyOf(owner);
      const tensor = row.tensor < 0 ? "" : this.strings[row.tensor];
      return { ...row, tensor, name: text(named), module: made === null ? "" : text(made) };
    });
    return found.sort((one, other) => other.bytes - one.bytes);
  }

  call(at) {
    const text = (column) => this.strings[this.calls[column][at]];
    return {
      op: text("op"),
      module: text("module"),
      source: text("source"),
      region: text("region"),
      phase: this.phases[this.calls.phase[at]],
      seconds: this.hasTimes ? (this.calls.nanoseconds[at] ?? 0) / 1e9 : null,
    };
  }

  /** The rows of a table that came as columns; those named in `texts` hold places in the table of strings. */
  rows(table, texts) {
    const columns = Object.entries(table);
    const length = columns.length ? columns[0][1].length : 0;
    return Array.from({ length }, (_, at) =>
      Object.fromEntries(
        columns.map(([key, column]) => [key, texts.includes(key) ? this.strings[column[at]] : column[at]]),
      ),
    );
  }
}
