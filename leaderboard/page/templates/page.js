// Sorting, filtering and live plots; without it the page is complete, in the order of the board, with still plots.
"use strict";
for (const table of document.querySelectorAll("table:is(.board, .matrix):has([data-order])")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      // The first click puts the best first: the most useful, the least leaked.
      const before = head.getAttribute("aria-sort");
      const sort = before === "none" ? head.dataset.best : before === "ascending" ? "descending" : "ascending";
      const up = sort === "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", sort);
      const number = head.classList.contains("number");
      const order = (row) => row.cells[column].dataset.order;
      for (const body of table.tBodies) {
        const lines = [...body.querySelectorAll("tr.line")];
        lines.sort((a, b) => {
          const x = order(a), y = order(b);
          // What was not measured comes last, whichever way.
          if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
          const less = number ? key(x) < key(y) : x < y;
          return (x === y ? 0 : less ? -1 : 1) * (up ? 1 : -1);
        });
        body.append(...lines);
      }
    });
  });
}
function key(text) {
  return text === "inf" ? Infinity : Number(text);
}
document.documentElement.classList.add("sortable");
const filter = document.getElementById("filter");
if (filter) {
  filter.parentElement.hidden = false;
  const said = filter.parentElement.querySelector("output");
  filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0, all = 0;
    for (const section of document.querySelectorAll("#board .section, #matrix .section")) {
      let here = 0;
      const counted = section.closest("#board") ? 1 : 0;
      for (const line of section.querySelectorAll("tr.line")) {
        const words = `${section.dataset.suite} ${line.dataset.words}`;
        line.hidden = !wanted.every((word) => words.includes(word));
        here += !line.hidden;
        all += counted;
      }
      section.hidden = !here;
      shown += counted ? here : 0;
    }
    said.textContent = wanted.length ? `${shown} of ${all} rows` : "";
  });
}
// A link to a cell opens what holds it, in browsers that do not do so by themselves.
function reveal() {
  const target = document.getElementById(location.hash.slice(1));
  if (!target?.closest("details")) return;
  for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
  target.scrollIntoView();
  target.querySelector("summary")?.focus({ preventScroll: true });
}
addEventListener("hashchange", reveal);
// A second click on the same link changes no hash.
addEventListener("click", (event) => { if (event.target.closest?.('a[href="' + location.hash + '"]')) reveal(); });
reveal();
for (const plot of window.vegaEmbed ? document.querySelectorAll(".plot") : []) {
  const specification = { ...JSON.parse(plot.nextElementSibling.textContent), width: "container" };
  specification.params[0].value = plot.clientWidth < 480;  // "narrow"
  const still = plot.innerHTML;
  // `ast` interprets Vega's expressions, because the content security policy forbids to compile them.
  const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: true, tooltip: { disableDefaultStyle: true } };
  vegaEmbed(plot, specification, options).catch(() => { plot.innerHTML = still; });
}
