"use strict";
// Enhances a page that is complete without it: tooltips, values at a cursor, and a timeline with zoom.
(() => {
  const tip = document.getElementById("tip");
  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 4))}px`;
    tip.style.top = `${y + box.height + 20 < innerHeight ? y + 16 : Math.max(4, y - box.height - 10)}px`;
  };
  const hide = () => (tip.hidden = true);
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

  document.addEventListener("pointermove", (event) => {
    const marked = event.target.closest?.("[data-tip]");
    if (marked) show(marked.dataset.tip, event.clientX, event.clientY);
    else if (!event.target.closest?.("[data-line], .lane-area")) hide();
  });
  document.addEventListener("scroll", hide, { passive: true });

  let resized = () => {};
  addEventListener("resize", () => resized());

  // A page that is renewed calls it for what is new.
  window.enhance = () => {
    hide();
    resized = () => {};
    for (const area of document.querySelectorAll("[data-line]")) {
      const data = JSON.parse(area.dataset.line);
      const cursor = area.appendChild(document.createElement("div"));
      cursor.className = "cursor";
      cursor.hidden = true;
      let at = data.left;
      const nearest = (line, x) => {
        let low = 0, high = line.x.length - 1;
        while (high - low > 1) {
          const middle = (low + high) >> 1;
          if (line.x[middle] <= x) low = middle;
          else high = middle;
        }
        return Math.abs(line.x[low] - x) <= Math.abs(line.x[high] - x) ? low : high;
      };
      const read = (x, clientY) => {
        const first = data.lines[0];
        at = first.x[nearest(first, x)];
        const lines = data.lines.map((line) => `${line.label ? `${line.label}: ` : ""}${line.y[nearest(line, at)]}`);
        const box = area.getBoundingClientRect();
        const share = (at - data.left) / (data.right - data.left || 1);
        cursor.hidden = false;
        cursor.style.left = `${100 * share}%`;
        show([`${data.xLabel}: ${at}`, ...lines].join("\n"), box.left + share * box.width, clientY ?? box.top + 20);
      };
      const leave = () => { cursor.hidden = true; hide(); };
      area.addEventListener("pointermove", (event) => {
        const box = area.getBoundingClientRect();
        read(data.left + ((event.clientX - box.left) / box.width) * (data.right - data.left), event.clientY);
      });
      area.addEventListener("pointerleave", leave);
      area.addEventListener("blur", leave);
      area.addEventListener("keydown", (event) => {
        const turn = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!turn) return;
        event.preventDefault();
        const first = data.lines[0];
        read(first.x[clamp(nearest(first, at) + turn, 0, first.x.length - 1)]);
      });
    }

    const closeup = document.querySelector("#closeup[data-timeline]");
    if (!closeup) return;
    const overview = document.getElementById("overview");
    const data = JSON.parse(closeup.dataset.timeline);
    const note = closeup.parentElement.querySelector("figcaption p");
    const BINS = 500;
    const shares = (spans, from, to) => {
      const width = (to - from) / BINS, found = new Float64Array(BINS);
      for (const [a, b] of spans) {
        const start = Math.max(a, from), end = Math.min(b, to);
        if (end <= start) continue;
        const last = Math.min(BINS - 1, Math.floor((end - from) / width));
        for (let n = Math.floor((start - from) / width); n <= last; n++) {
          found[n] += Math.max(0, Math.min(end, from + (n + 1) * width) - Math.max(start, from + n * width)) / width;
        }
      }
      return found;
    };
    const bars = (found, colour, base, stacked) => {
      const wide = 1000 / BINS;
      let html = "";
      for (let n = 0; n < BINS; ) {
        const share = Math.round(Math.min(1, found[n]) * 50) / 50, floor = base ? base[n] : 100, begin = n;
        do n++;
        while (n < BINS && Math.round(Math.min(1, found[n]) * 50) / 50 === share && (!base || base[n] === floor));
        if (share) {
          const height = stacked ? share * 100 : 100;
          html += `<rect class="${colour}" x="${begin * wide}" y="${floor - height}" width="${(n - begin) * wide + 0.3}" height="${height}"` +
            (stacked || share === 1 ? "/>" : ` opacity="${0.25 + 0.75 * share}"/>`);
          if (base) base.fill(floor - height, begin, n);
        }
      }
      return html;
    };
    const ticks = (from, to) => {
      const raw = (to - from) / 5, size = 10 ** Math.floor(Math.log10(raw));
      const step = [1, 2, 2.5, 5, 10].map((factor) => factor * size).find((value) => value >= raw * 0.999);
      const found = [];
      for (let n = Math.ceil(from / step); n * step <= to; n++) found.push(+(n * step).toPrecision(10));
      return found;
    };
    const areas = [...closeup.querySelectorAll(".lane:not(.axis) .lane-area")];
    const brush = overview.appendChild(document.createElement("div"));
    brush.className = "brush";
    const place = () => {
      const lane = overview.querySelector(".lane-area"), outer = overview.getBoundingClientRect(), inner = lane.getBoundingClientRect();
      brush.style.left = `${inner.left - outer.left + (view.from / data.end) * inner.width}px`;
      brush.style.width = `${Math.max(2, ((view.to - view.from) / data.end) * inner.width)}px`;
    };
    const view = { from: data.from, to: data.to };
    const go = (from, to) => {
      const width = clamp(to - from, data.end / 1e5 || 1e-6, data.end);
      view.from = clamp(from, 0, data.end - width);
      view.to = view.from + width;
      data.rows.forEach((row, index) => {
        const svg = areas[index].querySelector("svg");
        if (!row.pool) {
          svg.innerHTML = bars(shares(row.spans, view.from, view.to), row.colour, null, false);
          return;
        }
        const base = new Float64Array(BINS).fill(100);
        svg.innerHTML = data.kinds
          .map((kind, number) => {
            const own = row.spans.filter((span) => span[2] === number && span[1] > view.from && span[0] < view.to);
            return own.length ? bars(shares(own, view.from, view.to), kind.colour, base, true) : "";
          })
          .join("");
      });
      closeup.querySelector(".axis .lane-area").innerHTML = ticks(view.from, view.to)
        .map((t) => `<span style="left:${(100 * (t - view.from)) / (view.to - view.from)}%">${t.toLocaleString("en")}</span>`)
        .join("");
      if (note) note.textContent = `From ${view.from.toPrecision(4)} s to ${view.to.toPrecision(4)} s.`;
      place();
    };
    const act = (what) => {
      const width = view.to - view.from, middle = (view.from + view.to) / 2;
      if (what === "left") go(view.from - width / 2, view.to - width / 2);
      if (what === "right") go(view.from + width / 2, view.to + width / 2);
      if (what === "in") go(middle - width / 4, middle + width / 4);
      if (what === "out") go(middle - width, middle + width);
      if (what === "all") go(0, data.end);
    };
    const tools = closeup.parentElement.querySelector(".tools");
    tools.hidden = false;
    tools.addEventListener("click", (event) => act(event.target.dataset.go));
    closeup.addEventListener("keydown", (event) => {
      const what = { ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", "0": "all" }[event.key];
      if (!what) return;
      event.preventDefault();
      act(what);
    });
    const says = (row, t) => {
      const span = row.spans.find(([a, b]) => a <= t && t < b);
      if (row.pool) return span ? data.kinds[span[2]].name : "";
      return `${row.name} ${span ? "computes" : "does not compute"}`;
    };
    for (const [lanes, range] of [[overview, () => ({ from: 0, to: data.end })], [closeup, () => view]]) {
      const every = [...lanes.querySelectorAll(".lane:not(.axis) .lane-area")];
      const time = (event, area) => {
        const box = area.getBoundingClientRect(), { from, to } = range();
        return from + clamp((event.clientX - box.left) / box.width, 0, 1) * (to - from);
      };
      every.forEach((area, index) => {
        let began = null;
        area.addEventListener("pointermove", (event) => {
          const t = time(event, area);
          if (began !== null && Math.abs(t - began) > data.end / 500) go(Math.min(began, t), Math.max(began, t));
          else show(`${t.toFixed(2)} s: ${says(data.rows[index], t)}`, event.clientX, event.clientY);
        });
        area.addEventListener("pointerleave", hide);
        if (lanes !== overview) return;
        area.addEventListener("pointerdown", (event) => {
          began = time(event, area);
          area.setPointerCapture(event.pointerId);
          event.preventDefault();
        });
        area.addEventListener("pointerup", () => (began = null));
        area.addEventListener("pointercancel", () => (began = null));
      });
    }
    resized = place;
    place();
  };
  window.enhance();
})();
