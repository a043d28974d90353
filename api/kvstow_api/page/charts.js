/* Charts of uPlot, each with a table of its values for the keyboard and for screen readers. */
const charts = (() => {
  const LINES = ["--green", "--blue", "--amber", "--violet", "--red", "--teal"];
  const HEIGHT = 170;
  const STEPS = [1, 5, 10, 15, 30, 60, 120, 300]; // seconds between the marks of a time axis
  const BINARY = Array.from({ length: 50 }, (_, power) => 2 ** power); // steps between the lines of a scale of bytes
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const minute = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: seconds % 60 ? "2-digit" : undefined, hour12: false });
  const all = new Set();

  const element = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text) made.textContent = text;
    return made;
  };

  const axis = (more) => ({
    stroke: () => css("--quiet"), font: "11px system-ui, sans-serif",
    grid: { stroke: () => css("--edge"), width: 1 }, ticks: { stroke: () => css("--edge"), width: 1, size: 4 }, ...more,
  });

  /* `xs`: seconds since 1970, or values of an axis of doublings if `isSizes`. `xText` and `text` say values of the axes. */
  class Chart {
    constructor(parent, title, { text, xText, top, isSizes, isBinary }) {
      this.title = title;
      this.text = text;
      this.xText = xText;
      this.top = top;
      this.isSizes = isSizes;
      this.incrs = isBinary ? BINARY : undefined;
      this.isZoomed = false;
      this.labels = "";
      this.box = parent.appendChild(element("section", "card"));
      this.box.append(element("h2", "", title));
      this.note = this.box.appendChild(element("p", "quiet"));
      this.place = this.box.appendChild(element("div", "plot"));
      this.place.setAttribute("role", "img");
      this.details = this.box.appendChild(element("details", "values"));
      this.details.append(element("summary", "", "Values as a table"));
      this.table = this.details.appendChild(element("div", "lines")).appendChild(element("table"));
      this.details.addEventListener("toggle", () => this.fill());
      new ResizeObserver(() => this.resize()).observe(this.place);
      all.add(this);
    }

    /* `series`: label and values of each, of the same length as `xs`. `span`: seconds to show. `mark`: an x to mark. */
    update(xs, series, { span, mark, note, now }) {
      Object.assign(this, { xs, series, span, mark });
      this.note.textContent = note || "";
      this.note.hidden = !note;
      this.place.setAttribute("aria-label", `${this.title}: ${now}`);
      const labels = JSON.stringify(series.map((one) => one.label));
      if (labels !== this.labels) {
        this.labels = labels;
        this.plot?.destroy();
        this.plot = this.make();
      } else {
        this.plot.setData(this.data(), false);
      }
      this.scale();
      this.fill();
    }

    data() { return [this.xs, ...this.series.map((one) => one.values)]; }

    make() {
      const y = (plot, low, high) => [0, this.top ?? (high > 0 ? high * 1.1 : 1)];
      const x = this.isSizes ? { distr: 3, log: 2, time: false } : { time: true };
      const plot = new uPlot({
        width: Math.max(120, this.place.clientWidth), height: HEIGHT,
        scales: { x, y: { range: y } },
        axes: [
          axis(this.isSizes ? { splits: () => this.xs, values: (_, found) => found.map(this.xText) } : { size: 30, space: 70, incrs: STEPS, values: (_, found) => found.map(minute) }),
          axis({ size: 76, incrs: this.incrs, values: (_, found) => found.map(this.text) }),
        ],
        series: [
          { label: this.isSizes ? "size" : "time", value: (_, value) => (value === null ? "-" : this.xText(value)) },
          ...this.series.map((one, number) => ({
            label: one.label, stroke: () => css(LINES[number % LINES.length]), width: 2, dash: one.isDashed ? [6, 4] : [],
            points: { show: Boolean(this.isSizes), size: 7 }, value: (_, value) => (value == null ? "-" : this.text(value)),
          })),
        ],
        cursor: this.isSizes ? { drag: { x: false, y: false } } : { sync: { key: "time" }, drag: { x: true, y: false } },
        hooks: {
          setSelect: [(plot) => { if (plot.select.width > 0) this.isZoomed = true; }],
          draw: [(plot) => this.drawMark(plot)],
          setLegend: [(plot) => this.showPresent(plot)],
        },
      }, this.data(), this.place);
      plot.over.addEventListener("dblclick", () => { this.isZoomed = false; this.scale(); });
      return plot;
    }

    drawMark(plot) {
      if (this.mark == null) return;
      const x = plot.valToPos(this.mark, "x", true), { top, height } = plot.bbox, paint = plot.ctx;
      paint.save();
      paint.strokeStyle = css("--quiet");
      paint.setLineDash([4, 4]);
      paint.beginPath();
      paint.moveTo(x, top);
      paint.lineTo(x, top + height);
      paint.stroke();
      paint.restore();
    }

    scale() {
      if (this.isZoomed) return this.plot.redraw();
      const last = this.xs[this.xs.length - 1];
      this.plot.setScale("x", this.isSizes ? { min: this.xs[0], max: last } : { min: last - this.span, max: last });
    }

    /* While no pointer is over the chart, its legend has the values of the marked x, or else the newest ones. */
    showPresent(plot) {
      if (plot.cursor.idx == null) plot.setLegend({ idx: this.mark == null ? this.xs.length - 1 : this.xs.indexOf(this.mark) }, false);
    }

    resize() {
      if (this.plot && this.place.clientWidth) this.plot.setSize({ width: this.place.clientWidth, height: HEIGHT });
    }

    fill() {
      if (!this.details.open || !this.xs) return;
      const head = element("tr"), rows = [];
      for (const title of [this.isSizes ? "size" : "time", ...this.series.map((one) => one.label)])
        head.appendChild(element("th", "", title)).scope = "col";
      this.xs.forEach((x, number) => {
        const row = element("tr");
        row.appendChild(element("th", "", this.xText(x))).scope = "row";
        for (const one of this.series) {
          const value = one.values[number];
          row.append(element("td", "", value == null ? "-" : this.text(value)));
        }
        rows.push(row);
      });
      this.table.replaceChildren(head, ...(this.isSizes ? rows : rows.reverse()));
    }

    remove() {
      this.plot?.destroy();
      this.box.remove();
      all.delete(this);
    }
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const one of all) one.plot?.redraw(false, true);
  });
  return { Chart };
})();
