(() => {
  const POLL_MS = 2000, BUSY_MS = 5000, CONDITIONS = 8, ABSENT = "-", RANGES = [["1 min", 60], ["5 min", 300]];
  const byId = (name) => document.getElementById(name);

  /* -- words: as kvstow_api.texts has them ------------------------------------------------------------------------ */

  const digits = (value, most) => String(Number(value.toPrecision(most)));
  const count = (value) => (value == null ? ABSENT : Number(value).toLocaleString("en-US"));
  const percent = (value) => (value == null ? ABSENT : `${(value * 100).toFixed(1)} %`);
  const perSecond = (value) => (value == null ? ABSENT : `${value.toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 })}/s`);
  const bytes = (value) => {
    if (value == null) return ABSENT;
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let number = value, unit = 0;
    while (number >= 1024 && unit < units.length - 1) { number /= 1024; unit += 1; }
    return `${unit ? digits(number, 4) : Math.round(number)} ${units[unit]}`;
  };
  const rate = (value) => (value == null ? ABSENT : `${bytes(value)}/s`);
  const duration = (seconds) => {
    if (seconds == null) return ABSENT;
    if (seconds < 0.9995) return `${digits(seconds * 1000, 3)} ms`;
    if (seconds < 59.95) return `${digits(seconds, 3)} s`;
    const minutes = Math.floor(Math.round(seconds) / 60), left = Math.round(seconds) % 60;
    if (minutes < 60) return left ? `${minutes}m ${left}s` : `${minutes}m`;
    return minutes % 60 ? `${Math.floor(minutes / 60)}h ${minutes % 60}m` : `${Math.floor(minutes / 60)}h`;
  };
  const age = (seconds) => {
    const minutes = Math.floor(seconds / 60);
    return minutes < 60 ? `${minutes || "< 1"} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  };
  const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
  const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

  /* -- elements: texts become text nodes, so that no name is read as HTML ----------------------------------------- */

  const h = (tag, attributes, ...inner) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "click") made.addEventListener("click", value);
      else if (value != null && value !== false) made.setAttribute(name, value);
    }
    made.append(...inner.filter((one) => one != null && one !== ""));
    return made;
  };
  const cut = (text) => (text.length <= 24 ? text : `${text.slice(0, 13)}…${text.slice(-10)}`);
  /* A name ends in what tells it from others, so it is cut in the middle. */
  const name = (text) => {
    const cut = Math.max(0, text.length - 10);
    return text.length <= 18 ? text : h("span", { class: "name", title: text }, h("span", {}, text.slice(0, cut)), h("span", {}, text.slice(cut)));
  };
  const coded = (text) => text.split("`").map((part, number) => (number % 2 ? h("code", {}, part) : part));

  const shown = {};
  /* Fill a part of the page if what it shows has changed. The focus stays where it was. */
  const fill = (id, what, build) => {
    const key = JSON.stringify(what);
    if (shown[id] === key) return;
    shown[id] = key;
    const place = byId(id), focused = place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    place.replaceChildren(...build().filter(Boolean));
    if (focused) [...place.querySelectorAll("[data-key]")].find((one) => one.dataset.key === focused)?.focus();
  };

  /* -- tables ----------------------------------------------------------------------------------------------------- */

  /* Columns: title, value for sorting, and how it is shown. The first is the name. */
  const POOLS = [
    ["pool", (one) => one.name, (_, one) => poolLink(one.name)],
    ["state", (one) => one.state],
    ["memory", (one) => one.granted_bytes, bytes],
    ["used", (one) => (one.usable_slots ? 1 - one.slots.free / one.usable_slots : null), percent],
    ["hits", (one) => one.now.hit_ratio, percent],
    ["in flight", (one) => one.pending.loads + one.pending.stores, (value, one) => count(value) + (one.pending.stuck ? ` (${one.pending.stuck} stuck)` : "")],
    ["loads", (one) => one.now.load_bytes_per_second, rate],
    ["stores", (one) => one.now.store_bytes_per_second, rate],
    ["dropped", (one) => one.now.dropped_blocks_per_second, perSecond],
    ["evicted", (one) => one.now.evicted_blocks_per_second, perSecond],
    ["sessions", (one) => one.sessions, count],
  ];
  const SESSIONS = [
    ["session", (one) => one.id, (value) => name(value)],
    ["state", (one) => one.state],
    ["engine", (one) => one.engine, (value) => name(value)],
    ["host", (one) => one.host, (value) => name(value || ABSENT)],
    ["in flight", (one) => one.in_flight, count],
    ["oldest", (one) => (one.in_flight ? one.oldest_seconds : null), duration],
    ["holds", (one) => one.leased_slots + one.quarantined_slots, count],
    ["loads", (one) => one.load_bytes_per_second, rate],
    ["stores", (one) => one.store_bytes_per_second, rate],
    ["ranks", (one) => one.num_ranks, count],
    ["registered", (one) => one.registered_slots, count],
    ["age", (one) => one.age_seconds, age],
    ["pid", (one) => one.pid, (value) => (value == null ? ABSENT : String(value))],
  ];
  const TIERS = [
    ["namespace", (one) => one.namespace, (value) => name(value)],
    ["state", (one) => one.state],
    ["reading", (one) => one.reading_blocks, count],
    ["read", (one) => one.counters.read_blocks, count],
    ["hits", (one) => one.counters.hit_blocks, count],
    ["writing", (one) => one.writing_blocks, count],
    ["written", (one) => one.counters.written_blocks, count],
    ["waited", (one) => one.counters.wait_seconds, duration],
    ["saved", (one) => one.counters.saved_seconds, duration],
  ];
  const PARTS = [
    ["part", (one) => one.name, (value) => name(value)],
    ["state", (one) => one.state],
    ["used", (one) => one.used_bytes, (value, one) => (value == null ? ABSENT : `${bytes(value)} of ${bytes(one.size_bytes)}`)],
    ["reads", (one) => one.read_bytes_per_second, rate],
    ["writes", (one) => one.write_bytes_per_second, rate],
    ["written today", (one) => one.written_bytes_today, bytes],
    ["reason", (one) => one.reason],
  ];
  const RANKS = [
    ["rank", (one) => one.rank, (value) => String(value)],
    ["state", (one) => rankState(one)],
    ["session", (one) => one.session, (value) => name(value)],
    ["pinned", (one) => one.pinned_bytes, (value, one) => h("span", { class: "pinned" }, h("progress", { max: one.target_bytes || 1, value, "aria-label": `rank ${one.rank}` }), `${bytes(value)} of ${bytes(one.target_bytes)}`)],
    ["host", (one) => one.host, (value) => name(value || ABSENT)],
    ["pid", (one) => one.pid, (value) => (value == null ? ABSENT : String(value))],
    ["device", (one) => one.device],
    ["error", (one) => [one.error_reason, one.error].filter(Boolean).join(": ")],
  ];
  const rankState = (one) => {
    const silent = one.last_report_age_seconds;
    return silent != null && silent > 5 ? `silent for ${duration(Math.round(silent))}` : one.state;
  };

  const sorting = {};
  const sort = (id, columns, rows) => {
    const chosen = sorting[id];
    if (!chosen) return rows;
    const value = columns.find(([title]) => title === chosen.title)[1];
    const compare = (a, b) => (a == null ? 1 : b == null ? -1 : (a < b ? -1 : a > b ? 1 : 0) * chosen.way);
    return [...rows].sort((a, b) => compare(value(a), value(b)));
  };
  /* The first click sorts numbers from the largest, texts from A; the second the other way; the third not at all. */
  const sortBy = (id, columns, rows, title) => {
    const chosen = sorting[id], value = columns.find((one) => one[0] === title)[1];
    const first = rows.some((one) => typeof value(one) === "number") ? -1 : 1;
    if (chosen?.title !== title) sorting[id] = { title, way: first };
    else if (chosen.way === first) sorting[id] = { title, way: -first };
    else delete sorting[id];
    render();
  };
  /* `groups`: title and rows of each part of the table. */
  const table = (id, columns, groups, isTroubled, current) => {
    const rows = groups.flatMap((one) => one.rows);
    const head = h("tr", {}, ...columns.map(([title]) => {
      const way = sorting[id]?.title === title ? sorting[id].way : 0;
      const click = () => sortBy(id, columns, rows, title);
      const button = h("button", { type: "button", "data-key": `${id}-${title}`, click }, title);
      return h("th", { scope: "col", "aria-sort": way ? (way > 0 ? "ascending" : "descending") : "none" }, button);
    }));
    const line = (row) => h("tr", { class: (isTroubled(row) ? "troubled " : "") + (current === columns[0][1](row) ? "selected" : "") },
      ...columns.map(([title, value, show], number) => {
        const raw = value(row), text = show ? show(raw, row) : raw || ABSENT;
        if (!number) return h("th", { scope: "row" }, text);
        return h("td", { "data-title": title, class: title === "state" ? raw : text === ABSENT ? "absent" : null }, text);
      }));
    const bodies = groups.map((group) => h("tbody", {},
      group.title && h("tr", { class: "group" }, h("th", { scope: "rowgroup", colspan: columns.length }, ...group.title)),
      ...sort(id, columns, group.rows).map(line)));
    return h("div", { class: "lines" }, h("table", {}, h("thead", {}, head), ...bodies));
  };
  const pairs = (rows) => h("table", { class: "pairs" }, h("tbody", {}, ...rows.map(([title, ...cells]) =>
    h("tr", {}, h("th", { scope: "row" }, title), ...cells.map((cell) => h("td", {}, cell))))));
  const more = (number, what) => (number ? h("p", { class: "quiet" }, `and ${number} more ${what}`) : null);

  /* -- parts of the page ------------------------------------------------------------------------------------------ */

  let overview = null, span = 300;
  const requestedPool = () => new URLSearchParams(location.search).get("pool");
  const choose = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    history.pushState(null, "", event.currentTarget.getAttribute("href"));
    read();
  };
  const poolLink = (pool, words) => h("a", { href: pool == null ? "?" : `?pool=${encodeURIComponent(pool)}`, "data-key": `pool ${pool}`, "aria-current": pool != null && pool === overview.selected && "true", click: choose }, words || name(pool));
  const ofPool = () => (overview.pools.length > 1 && overview.selected ? [" of pool ", name(overview.selected)] : []);

  const parts = {
    state({ info, state, reason, conditions, alike, omitted, memory }) {
      const isGood = ["ready", "pinning", "starting"].includes(state);
      const hasReason = conditions.some((one) => (isGood ? one.what === reason : one.severity !== "info"));
      const about = [info.settings.model, info.mode, `version ${info.version}`, info.addresses[0], `since ${info.started.slice(0, 19).replace("T", " ")} UTC`];
      const size = memory.populated_bytes < memory.target_bytes ? `${bytes(memory.populated_bytes)} of ` : "";
      about.push(`${size}${bytes(memory.target_bytes)} of memory`, info.attach && `engines attach at ${info.attach}`);
      const populated = memory.populated_bytes < memory.target_bytes && h("progress", { max: memory.target_bytes, value: memory.populated_bytes, "aria-label": "memory populated" });
      fill("state", [info.host_name, state, reason, conditions, alike, about, omitted.conditions], () => [
        h("h1", {}, "kvstow ", h("span", { class: "host" }, info.host_name), " ", h("span", { class: `pill ${state}` }, state)),
        hasReason ? null : h("p", {}, reason),
        conditions.length ? h("ul", { class: "conditions" }, ...conditions.slice(0, CONDITIONS).map((one) =>
          h("li", { class: one.severity }, h("b", {}, one.severity), " ", one.what, " ", h("span", { class: "quiet" }, ...coded(one.fix)),
            alike[one.name] ? h("b", {}, ` and ${count(alike[one.name])} more like this`) : null))) : null,
        more(omitted.conditions + Math.max(0, conditions.length - CONDITIONS), "kinds of conditions: kvstow doctor"),
        populated || null,
        h("p", { class: "quiet" }, about.filter(Boolean).join(", ")),
      ]);
    },

    tiles({ headline: now, memory, transfers: { pending } }) {
      const flight = `${counted(pending.loads, "load")}, ${counted(pending.stores, "store")} in flight`;
      const learning = "known when an engine has computed enough prompts";
      const tiles = [
        ["Hit ratio", percent(now.hit_ratio), now.hit_ratio == null ? "no look-ups in the last 10 s" : "of the blocks, the last 10 s", now.hit_ratio_ever == null ? "" : `${percent(now.hit_ratio_ever)} since the start`],
        ["GPU time saved", duration(now.gpu_seconds_saved), now.gpu_seconds_saved == null ? learning : "since the start", now.gpu_seconds_saved_per_hour == null ? "" : `now ${duration(now.gpu_seconds_saved_per_hour)} an hour`],
        ["First token sooner by", duration(now.first_token_seconds_saved), now.gpu_seconds_saved == null ? learning : "for each load, the last 5 minutes", ""],
        ["Full", percent(now.used_ratio), "of the usable memory", `${bytes(memory.granted_bytes)} of ${bytes(memory.target_bytes)} in pools`],
        ["Loads", rate(now.load_bytes_per_second), "per rank, the last 10 s", flight],
        ["Stores", rate(now.store_bytes_per_second), "per rank, the last 10 s", pending.stuck ? `${pending.stuck} stuck` : ""],
      ];
      fill("tiles", tiles, () => tiles.map(([title, value, about, also]) =>
        h("section", { class: "tile" }, h("h2", {}, title), h("p", { class: "figure" }, value), h("p", { class: "quiet" }, about), also ? h("p", { class: "quiet" }, also) : null)));
    },

    ranges() {
      fill("ranges", span, () => RANGES.map(([words, seconds]) => h("button", {
        type: "button", "data-key": words, "aria-pressed": String(span === seconds),
        click: () => { span = seconds; for (const one of Object.values(drawn)) one.isZoomed = false; render(); },
      }, words)).concat(h("span", { class: "quiet" }, "drag over a chart to enlarge a part, double-click to see all")));
    },

    charts({ curves, time }) {
      const now = Date.parse(time) / 1000, given = {};
      const length = Math.max(2, ...curves.flatMap((one) => Object.values(one.points).map((points) => points.length)));
      const isOne = curves.length === 1;
      for (const pool of curves) for (const [figure, points] of Object.entries(pool.points)) {
        const { label, one, each, unit } = CURVES[figure];
        const name = isOne ? label : cut(pool.pool), padded = [...Array(length - points.length).fill(null), ...points];
        const chart = (given[isOne ? one : each] ||= { unit, series: [], now: [] });
        chart.series.push({ label: name, values: padded });
        chart.now.push(`${name} ${unit.text(points[points.length - 1])}`);
      }
      const step = curves[0]?.interval_seconds || 5, last = Math.floor(now / step) * step;
      const xs = Array.from({ length }, (_, number) => last - (length - 1 - number) * step);
      const keys = Object.keys(given).map((title) => `${title} ${isOne}`);
      for (const old of Object.keys(drawn)) if (old !== "sizes" && !keys.includes(old)) { drawn[old].remove(); delete drawn[old]; }
      for (const [title, { unit, series, now: words }] of Object.entries(given)) {
        const chart = (drawn[`${title} ${isOne}`] ||= new charts.Chart(byId("charts"), title, { ...unit, xText: clock }));
        chart.update(xs, series, { span, now: words.join(", ") });
      }
    },

    pools({ pools, troubled, selected, is_missing: isMissing, omitted, info }) {
      fill("pools", [pools, selected, isMissing, troubled, sorting.pools], () => [
        h("h2", {}, "Pools ", pools.length > 1 && (selected || isMissing) ? poolLink(null, "all pools") : null),
        isMissing ? h("p", { class: "error" }, "there is no pool of the name that you have chosen; ", poolLink(null, "show all")) : null,
        pools.length ? table("pools", POOLS, [{ rows: pools }], (one) => troubled.pools.includes(one.name), pools.length > 1 ? selected : null)
          : h("p", { class: "quiet" }, "no engine has attached yet, so there is no pool", info.attach ? `; vLLM attaches with "attach": "${info.attach}" in kv_connector_extra_config` : ""),
        more(omitted.pools, "pools"),
      ]);
    },

    sessions({ sessions, troubled, omitted, pools }) {
      const names = [...new Set(sessions.map((one) => one.pool))];
      const groups = names.map((pool) => {
        const rows = sessions.filter((one) => one.pool === pool);
        return { rows, title: names.length > 1 ? [name(pool), ` ${counted(rows.length, "engine")}`] : null };
      });
      const seen = sessions.map((one) => ({ ...one, age_seconds: age(one.age_seconds) }));
      fill("sessions", [seen, pools.length, troubled, sorting.sessions], () => [
        h("h2", {}, "Engines", ...ofPool()),
        sessions.length ? table("sessions", SESSIONS, groups, (one) => troubled.sessions.includes(one.id)) : h("p", { class: "quiet" }, "no engine is attached"),
        more(omitted.sessions, "engines"),
      ]);
    },

    ranks({ ranks, troubled, selected, omitted }) {
      const seen = ranks.map((one) => [one.session, one.rank, rankState(one), one.pinned_bytes, one.target_bytes, one.error_reason, one.error]);
      fill("ranks", [seen, selected, troubled, sorting.ranks], () => (ranks.length ? [
        h("h2", {}, selected ? "Ranks" : "Ranks that a condition concerns", ...ofPool()),
        table("ranks", RANKS, [{ rows: ranks }], (one) => troubled.ranks.includes(`${one.session}/${one.rank}`)),
        more(omitted.ranks, "ranks"),
      ] : []));
    },

    slots({ stats }) {
      const pool = stats?.pool, slots = pool && { ...pool.slots, "not pinned": Math.max(0, pool.capacity_slots - pool.usable_slots) };
      fill("slots", [slots, pool], () => {
        if (!pool) return [];
        const states = ["leased", "cached", "filling", "quarantined", "free", "not pinned"].filter((state) => slots[state] || ["free", "cached"].includes(state));
        const bar = h("div", { class: "bar", role: "img", "aria-label": states.map((state) => `${state} ${slots[state]}`).join(", ") }, ...states.map((state) => {
          const part = h("i", { class: state.replace(" ", "-") });
          part.style.flexGrow = slots[state];
          return part;
        }));
        const legend = states.map((state) => h("li", { class: state.replace(" ", "-") }, `${state} `, h("b", {}, count(slots[state]))));
        const about = `${count(pool.usable_slots)} of ${count(pool.capacity_slots)} slots usable, ${bytes(pool.capacity_slots * pool.slot_bytes)} per rank, ${pool.policy}`;
        return [h("h2", {}, "Slots", ...ofPool()), bar, h("ul", { class: "legend" }, ...legend), h("p", { class: "quiet" }, about)];
      });
    },

    sizes({ curve }) {
      const items = curve?.items || [];
      if (!items.length) {
        drawn.sizes?.remove();
        delete drawn.sizes;
        fill("sizes", curve?.advice, () => (curve ? [h("section", { class: "card" }, h("h2", {}, "Hits by size", ...ofPool()), h("p", { class: "quiet" }, curve.advice))] : []));
        return;
      }
      if (!drawn.sizes) fill("sizes", "chart", () => []);
      const chart = (drawn.sizes ||= new charts.Chart(byId("sizes"), "Hits by size", { text: percent, xText: bytes, top: null, isSizes: true }));
      const own = { label: curve.policy, values: items.map((one) => one.ratio) };
      const present = items.find((one) => one.times === 1);
      chart.update(items.map((one) => one.num_bytes), [own],
        { mark: present?.num_bytes, note: [curve.advice, curve.disk_advice].filter(Boolean).join("; "), now: present ? `${percent(present.ratio)} with ${bytes(present.num_bytes)}` : "" });
    },

    pending({ transfers: { pending, items, load_choices: choices }, sessions }) {
      const total = Object.values(choices).reduce((sum, one) => sum + one, 0);
      const layered = Object.entries(choices).reduce((sum, [choice, one]) => sum + (choice.startsWith("layer_") ? one : 0), 0);
      const rows = [
        ["loads", count(pending.loads), bytes(pending.load_bytes)],
        ["stores", count(pending.stores), bytes(pending.store_bytes)],
        ["oldest", pending.loads || pending.stores ? duration(pending.oldest_seconds) : "none", pending.stuck ? `${pending.stuck} stuck` : ""],
      ];
      if (total) rows.push(["loads by layer", `${count(layered)} of ${count(total)}`, Object.entries(choices).filter(([, one]) => one).map(([choice, one]) => `${choice.replaceAll("_", " ")} ${count(one)}`).join(", ")]);
      const oldest = items.map((one) => [one.direction, one.state, `${counted(one.blocks, "block")}, ${duration(one.age_seconds)}${sessions.length > 1 ? `, engine ${one.session}` : ""}${one.request_id ? `, request ${one.request_id}` : ""}`]);
      fill("pending", [rows, oldest], () => [h("h2", {}, "In flight", ...ofPool()), pairs(rows), oldest.length ? h("h3", {}, "oldest") : null, oldest.length ? pairs(oldest) : null]);
    },

    evictions({ stats }) {
      const some = (counts, wanted) => Object.entries(counts).filter(([key, number]) => number && wanted(key)).map(([key, number]) => [key.replaceAll("_", " "), count(number)]);
      const evicted = stats && some(stats.evictions, () => true), dropped = stats && some(stats.stores, (key) => /^(dropped_|failed)/.test(key));
      fill("evictions", [evicted, dropped], () => (stats ? [
        h("h2", {}, "Evictions", ...ofPool()),
        evicted.length ? pairs(evicted) : h("p", { class: "quiet" }, "none"),
        dropped.length ? h("h3", {}, "blocks not stored, by reason") : null, dropped.length ? pairs(dropped) : null,
      ] : []));
    },

    tier({ tier, troubled, omitted }) {
      fill("tier", [tier, troubled, sorting.tier, sorting.parts], () => (tier.url ? [
        h("h2", {}, "Store below the pools", ...ofPool()),
        tier.items.length ? table("tier", TIERS, [{ rows: tier.items }], (one) => troubled.tiers.includes(one.namespace)) : h("p", { class: "quiet" }, "no engine uses it"),
        more(omitted.tiers, "namespaces"),
        tier.parts.length ? table("parts", PARTS, [{ rows: tier.parts }], (one) => one.state !== "on") : null,
        h("p", { class: "quiet" }, tier.url),
      ] : []));
    },

    events({ events }) {
      fill("events", events, () => [h("h2", {}, "Latest events (UTC)"), h("ol", {}, ...events.map((one) =>
        h("li", {}, h("time", { datetime: one.time }, one.time.slice(11, 19)), " ", one.words)))]);
    },
  };

  const drawn = {};
  /* A chart of one pool has the figures together, a chart of several has one figure of each. */
  const BANDWIDTH = { one: "Bandwidth per rank", unit: { text: rate, isBinary: true } };
  const CURVES = {
    hit_ratio: { label: "hit ratio", one: "Hit ratio", each: "Hit ratio by pool", unit: { text: percent, top: 1 } },
    load_bytes_per_second: { label: "loads", each: "Loads by pool, per rank", ...BANDWIDTH },
    store_bytes_per_second: { label: "stores", each: "Stores by pool, per rank", ...BANDWIDTH },
  };
  const render = () => { for (const part of Object.values(parts)) part(overview); };

  /* -- reading ---------------------------------------------------------------------------------------------------- */

  const live = byId("live");
  let timer = null, number = 0;
  const title = (words) => { document.title = `kvstow ${overview?.info.host_name || location.host}: ${words}`; };
  const lost = (what) => {
    if (!document.body.classList.contains("lost")) live.textContent = `${what} since ${new Date().toLocaleTimeString()}: the figures are outdated. Retrying`;
    document.body.classList.add("lost");
    title(what);
  };
  const ask = async (mine) => {
    const pool = requestedPool();
    let answer, given;
    try {
      answer = await fetch(`v1/overview${pool == null ? "" : `?pool=${encodeURIComponent(pool)}`}`, { cache: "no-store" });
      given = answer.ok ? await answer.json() : null;
    } catch {
      if (mine === number) lost("no answer");
      return POLL_MS;
    }
    if (mine !== number) return POLL_MS;
    if (!answer.ok) {
      lost(answer.status === 503 ? "the server is busy" : `refused (${answer.status})`);
      return BUSY_MS;
    }
    overview = given;
    render();
    if (live.textContent !== "live") live.textContent = "live";
    document.body.classList.remove("lost");
    title(overview.state);
    return POLL_MS;
  };
  /* Ask now, and again and again while the page can be seen. */
  const read = async () => {
    const mine = (number += 1);
    clearTimeout(timer);
    const pause = await ask(mine);
    if (mine === number && !document.hidden) timer = setTimeout(read, pause);
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) read(); });
  addEventListener("popstate", read);
  read();
})();
