"use strict";

// The unit under the cursor, the table's order and filter, the copy button. Everything else works without a script.
(() => {
  const find = (id) => document.getElementById(id);

  function followUnits() {
    const chart = find("unit-chart"), scrub = find("scrub"), overlay = find("overlay"), count = Number(chart.dataset.count);
    const show = (index) => {
      const row = find(`unit-${index}`), cells = row.cells;
      Object.assign(find("cursor").style, { left: `${(100 * (index + 0.5)) / count}%`, width: `${100 / count}%` });
      document.querySelectorAll("tr.is-picked").forEach((other) => other.classList.remove("is-picked"));
      row.classList.add("is-picked");
      const link = document.createElement("a");
      link.href = `#unit-${index}`;
      link.textContent = cells[0].textContent;
      const text = (words) => Object.assign(document.createElement("span"), { textContent: words });
      find("readout").replaceChildren(
        link, cells[1].firstElementChild.cloneNode(true), text(cells[2].textContent),
        text(`KL ${Number(cells[8].dataset.v).toFixed(5)}`),
      );
      scrub.setAttribute("aria-valuetext", `${cells[0].textContent}, ${cells[1].textContent}`);
    };
    const choose = (event) => {
      const box = overlay.getBoundingClientRect();
      const index = Math.floor((count * (event.clientX - box.left)) / box.width);
      scrub.value = String(Math.min(Math.max(index, 0), count - 1));
      show(Number(scrub.value));
    };
    scrub.addEventListener("input", () => show(Number(scrub.value)));
    overlay.addEventListener("pointermove", choose);
    overlay.addEventListener("pointerdown", choose);
    scrub.value = chart.dataset.start; // a browser may have kept another one from before a reload
    show(Number(scrub.value));
  }

  function orderTable() {
    const table = find("unit-table"), heads = [...table.tHead.rows[0].cells];
    const compare = (a, b) => (Number.isNaN(Number(a)) || Number.isNaN(Number(b)) ? a.localeCompare(b) : a - b);
    heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
      const wasUp = head.getAttribute("aria-sort") === "ascending", wasDown = head.getAttribute("aria-sort") === "descending";
      const isNumber = head.classList.contains("is-number");
      const isDown = wasUp || (!wasDown && isNumber); // the largest first, where there are numbers
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => (isDown ? -1 : 1) * compare(a.cells[column].dataset.v, b.cells[column].dataset.v));
      table.tBodies[0].append(...rows);
    }));
  }

  function filterTable() {
    const rows = [...find("unit-table").tBodies[0].rows];
    const inputs = [find("find"), find("kind"), find("precision")];
    const apply = () => {
      const [words, kind, precision] = inputs.map((input) => input.value.trim().toLowerCase());
      let shown = 0;
      for (const row of rows) {
        const matches = row.textContent.toLowerCase().includes(words)
          && (!kind || row.dataset.kind.toLowerCase() === kind)
          && (!precision || row.dataset.precision.toLowerCase() === precision);
        row.hidden = !matches;
        shown += matches ? 1 : 0;
      }
      find("shown").textContent = `${shown} of ${rows.length} units`;
      find("nothing").hidden = shown > 0;
    };
    inputs.forEach((input) => input.addEventListener("input", apply));
    find("filters").addEventListener("submit", (event) => event.preventDefault());
    apply(); // a browser may have kept a filter from before a reload
  }

  function copyPlan() {
    const select = () => {
      getSelection().selectAllChildren(find("plan-text"));
      return document.execCommand("copy");
    };
    find("copy").addEventListener("click", async () => {
      let copied = false;
      try {
        await navigator.clipboard.writeText(find("plan-text").textContent);
        copied = true;
      } catch {
        copied = select(); // no clipboard on this page: the old way, and the text stays marked
      }
      find("copied").textContent = copied ? "Copied." : "Marked: copy it with Ctrl+C.";
    });
  }

  if (find("unit-chart")) {
    followUnits();
    orderTable();
    filterTable();
  }
  if (find("copy")) copyPlan();
})();
