// Filters, order, threat model and number of rows of the headline board, all kept in the fragment of the address.
"use strict";
{
  const table = document.querySelector("#board table.board"), form = document.getElementById("filters");
  const paging = document.querySelector(".paging"), threat = document.querySelector(".threat");
  const { reasons, under } = JSON.parse(document.getElementById("under").textContent);
  const numbers = (name) => new Map(under[name].map(([id, ...of], place) => [id, [place, ...of]]));
  const heads = [...table.tHead.rows[0].cells];
  const depending = heads.flatMap((head, column) => ("depends" in head.dataset ? [column] : []));
  const NOT_ATTACKED = "not attacked under this threat model";
  const page = Number(paging.querySelector("button").dataset.more);
  const fields = [...form.elements].filter((field) => field.name);
  const bodies = [...table.tBodies].filter((body) => !body.classList.contains("heading"));
  const built = new Map(bodies.map((body) => [body, [...body.querySelectorAll("tr.line")]]));
  const lines = [...built.values()].flat();
  const fronts = new Map(lines.map((line) => [line, line.classList.contains("front")]));
  const originals = new Map();
  let access = "", limit = page, printing = false;

  function parameters() {
    return new URLSearchParams(location.hash.slice(1));
  }
  // A link to a footnote has no state, and keeps the one that is shown.
  const keys = [...fields.map((field) => field.name), "sort", "rows", "all"];
  const isState = () => !location.hash || keys.some((name) => parameters().has(name));
  let current = new URLSearchParams();

  function go(change, replace = false) {
    const next = new URLSearchParams(current);
    next.delete("all");
    for (const [name, value] of Object.entries(change)) value ? next.set(name, value) : next.delete(name);
    const hash = "#" + (next.toString() || "all");  // an empty fragment would scroll to the top
    if (replace) location.replace(hash); else location.hash = hash;
  }

  function apply() {
    if (!isState()) return;
    current = parameters();
    for (const field of fields) {
      const value = current.get(field.name) ?? "";
      const isOption = field.tagName !== "SELECT" || [...field.options].some((option) => option.value === value);
      if (field.value !== (isOption ? value : "")) field.value = isOption ? value : "";
      field.classList.toggle("set", field.value !== "");
    }
    change(form.elements.threat.value);
    order(current.get("sort") ?? "");
    limit = current.get("rows") === "all" ? Infinity : Math.max(page, Number.parseInt(current.get("rows") ?? "") || page);
    show();
  }

  function change(wanted) {
    if (wanted === access) return;
    access = wanted;
    threat.hidden = !access;
    threat.querySelector("b").textContent = form.elements.threat.selectedOptions[0].textContent;
    const rows = access ? numbers(access) : null;
    for (const line of lines) {
      const [, front, cells] = rows?.get(line.dataset.row) ?? [];
      line.classList.toggle("front", access ? front === 1 : fronts.get(line));
      depending.forEach((column, i) => {
        const cell = line.cells[column];
        if (!originals.has(cell)) originals.set(cell, [[...cell.childNodes], cell.dataset.order]);
        const [nodes, order] = originals.get(cell);
        if (access) {
          // In words once a row, because a tooltip cannot be read on a phone.
          fill(cell, cells[i] || ["n/a", heads[column].dataset.key === "attack" ? NOT_ATTACKED : "", "", null, 0]);
        } else {
          cell.replaceChildren(...nodes);
          sortKey(cell, order);
        }
      });
    }
  }

  function sortKey(cell, order) {
    if (order === undefined || order === null) delete cell.dataset.order; else cell.dataset.order = order;
  }

  function fill(cell, [text, ends = "", bound = "", order, reason, path = ""]) {
    const value = document.createElement("span");
    value.className = "value";
    value.title = reason === 0 ? NOT_ATTACKED : reasons[reason - 1] ?? "";
    const holder = path ? value.appendChild(document.createElement("a")) : value;
    if (path) holder.href = path;
    holder.textContent = text;
    const rest = [ends, bound].filter(Boolean).map((words) => {
      const span = document.createElement("span");
      span.className = "ends";
      span.textContent = words;
      return span;
    });
    cell.replaceChildren(value, ...rest);
    sortKey(cell, order);
  }

  // The board's own order first, so that equal cells stand in it; then the clicks of page.js.
  function order(wanted) {
    const places = access ? numbers(access) : null;
    for (const [body, of] of built) {
      const sorted = [...of];
      if (places) sorted.sort((a, b) => places.get(a.dataset.row)[0] - places.get(b.dataset.row)[0]);
      body.append(...sorted);
    }
    heads.forEach((head) => head.setAttribute("aria-sort", "none"));
    const [key, direction] = wanted.split(".");
    const head = heads.find((candidate) => candidate.dataset.key === key);
    if (!head || !["ascending", "descending"].includes(direction)) return;
    for (let clicks = 0; clicks < 2 && head.getAttribute("aria-sort") !== direction; clicks++) {
      head.querySelector("button").dispatchEvent(new Event("click", { bubbles: false }));
    }
  }

  function show() {
    const wanted = ["data", "model", "epsilon", "family", "tier"].map((name) => [name, form.elements[name].value]);
    const text = form.elements.q.value.toLowerCase().split(/\s+/).filter(Boolean);
    const most = printing ? Infinity : limit;
    let matching = 0, heading = null;
    for (const body of table.tBodies) {
      if (body.classList.contains("heading")) {
        heading = body;
        heading.hidden = true;
        continue;
      }
      let linesShown = 0;
      for (const line of body.querySelectorAll("tr.line")) {
        const data = { ...body.dataset, ...line.dataset };
        const matches = wanted.every(([name, value]) => !value || data[name] === value)
          && text.every((word) => data.words.includes(word));
        matching += matches;
        line.hidden = !matches || matching > most;
        linesShown += !line.hidden;
      }
      body.hidden = !linesShown;
      if (linesShown) heading.hidden = false;
    }
    const shown = Math.min(matching, most), hidden = matching - shown;
    paging.hidden = matching === lines.length && !hidden;
    paging.querySelector("output").textContent = `${matching} of ${lines.length} rows match`
      + (hidden ? `, ${shown} are shown and ${hidden} further ones hidden` : "");
    for (const button of paging.querySelectorAll("button")) button.hidden = !hidden;
  }

  // A header stays in sight where the table is no wider than the page; elsewhere the table scrolls in its frame.
  const box = table.parentElement;
  const fit = () => box.classList.toggle("fits", innerWidth > 720 && table.offsetWidth <= box.clientWidth);
  addEventListener("resize", fit);

  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    location.hash = "#all";
  });
  for (const field of fields) {
    // Letters make no history, or every one would be a step back.
    if (field.tagName === "INPUT") field.addEventListener("input", () => go({ q: field.value, rows: "" }, true));
    else field.addEventListener("change", () => go({ [field.name]: field.value, rows: "" }));
  }
  table.tHead.addEventListener("click", (event) => {
    const head = event.target.closest("th");
    if (head) go({ sort: `${head.dataset.key}.${head.getAttribute("aria-sort")}` });
  });
  for (const button of paging.querySelectorAll("button")) {
    button.addEventListener("click", () => go({ rows: button.dataset.more === "all" ? "all" : String(limit + page) }));
  }
  addEventListener("hashchange", apply);
  addEventListener("beforeprint", () => { printing = true; show(); });
  addEventListener("afterprint", () => { printing = false; show(); });
  apply();
  fit();
}
