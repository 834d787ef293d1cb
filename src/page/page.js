"use strict";
// Draws what page.cpp wrote as data: memory, the map of bytes, the table of targets. Everything
// from a file reaches the page as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  root.classList.add("scripted");

  const el = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "class") node.className = value;
      else if (key in node && typeof value === "function") node[key] = value;
      else node.setAttribute(key, value);
    }
    node.append(...children);
    return node;
  };
  const by_id = (id) => document.getElementById(id);
  const bytes_text = (bytes) => {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let unit = 0;
    while (bytes >= 999.5 && unit < units.length - 1) { bytes /= 1000; ++unit; }
    return `${unit === 0 ? bytes : bytes.toFixed(bytes < 10 ? 2 : 1)} ${units[unit]}`;
  };
  const count_text = (count) => count.toLocaleString("en");
  const colour = (index) => `hsl(${(index * 67 + 205) % 360} 55% ${62 + (index % 3) * 7}%)`;

  const targets = data.targets.map((row, index) => ({
    index, name: row[0], kind: data.words[row[1]], shape: row[2], dtype: data.words[row[3]],
    device: data.words[row[4]], origin: data.words[row[5]], bytes: row[6], position: row[7],
    from: row[8], boxes: row[9], box_count: row[10], held: row[11], terms: row[12] || [],
  }));

  // ---- findings: suggestions can be copied
  for (const code of document.querySelectorAll(".suggestion")) {
    const button = el("button", { class: "copy", type: "button" }, "copy");
    button.onclick = async () => {
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch {  // some browsers deny the clipboard to a page from a file
        getSelection().selectAllChildren(code);
        document.execCommand("copy");
      }
      button.textContent = "copied";
    };
    code.after(button);
  }

  // ---- charts
  const shape_of = (svg, tag, attributes, text) => {
    const node = document.createElementNS(svg.namespaceURI, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    svg.append(node);
    return node;
  };
  const width = 900, height = 240, left = 70, bottom = 24, top = 12;

  const axes = (svg, x_max, y_max, x_text, y_text) => {
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    for (let step = 0; step <= 4; ++step) {
      const y = top + (height - bottom - top) * (1 - step / 4);
      shape_of(svg, "line", { class: "axis", x1: left, x2: width - 8, y1: y, y2: y });
      shape_of(svg, "text", { x: left - 6, y: y + 4, "text-anchor": "end" },
               y_text(y_max * step / 4));
      const x = left + (width - left - 40) * step / 4;
      shape_of(svg, "text", { x, y: height - 6, "text-anchor": "middle" }, x_text(x_max * step / 4));
    }
    return [(x) => left + (width - left - 40) * (x_max ? x / x_max : 0),
            (y) => top + (height - bottom - top) * (1 - (y_max ? y / y_max : 0))];
  };

  const draw_memory = () => {
    const devices = Object.keys(data.peaks);
    const order = targets.filter((t) => t.position >= 0).sort((a, b) => a.position - b.position);
    const before = {};
    for (const t of targets) {
      if (t.position < 0) before[t.device] = (before[t.device] || 0) + t.held;
    }
    const lines = {}, held = {};
    for (const device of devices) {
      held[device] = before[device] || 0;
      lines[device] = [[0, held[device]]];
    }
    let read = 0;
    for (const t of order) {
      read += t.bytes;
      if (!(t.device in held)) continue;
      held[t.device] += t.held;
      lines[t.device].push([read, held[t.device]]);
    }
    const limits = Object.values(data.limits);
    const y_max = Math.max(1, ...Object.values(data.peaks), ...limits);
    const svg = by_id("memory");
    const [x, y] = axes(svg, read, y_max, bytes_text, bytes_text);
    const legend = by_id("memory-legend");
    devices.forEach((device, i) => {
      const points = lines[device];
      const stride = Math.ceil(points.length / 600);
      const shown = points.filter((_, p) => p % stride === 0 || p === points.length - 1);
      shown.push([read, held[device]]);
      const path = shown.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
      shape_of(svg, "polyline", { points: path, fill: "none", stroke: colour(i),
                                  "stroke-width": 2.5 });
      const peak = y(data.peaks[device]);
      shape_of(svg, "line", { x1: left, x2: width - 8, y1: peak, y2: peak, stroke: colour(i),
                              "stroke-dasharray": "2 4" });
      const limit = data.limits[device];
      if (limit !== undefined) {
        shape_of(svg, "line", { class: "limit", x1: left, x2: width - 8, y1: y(limit),
                                y2: y(limit) });
      }
      const text = `${device}: ends with ${bytes_text(held[device])}, peak ` +
        `${bytes_text(data.peaks[device])}` +
        (limit === undefined ? "" : `, limit ${bytes_text(limit)}`);
      legend.append(el("li", {}, el("span", { style: `background:${colour(i)}` }), text));
      shape_of(svg, "title", {}, text);
    });
  };

  const draw_speed = () => {
    if (data.progress.length < 2) return;
    const speeds = [];
    let [from, before] = [0, 0];
    for (const [seconds, bytes] of data.progress) {
      if (seconds <= from) continue;
      const speed = (bytes - before) / (seconds - from);
      speeds.push([from, speed], [seconds, speed]);
      [from, before] = [seconds, bytes];
    }
    if (speeds.length === 0) return;
    const svg = by_id("speed");
    const [x, y] = axes(svg, speeds[speeds.length - 1][0], Math.max(...speeds.map((s) => s[1])),
                        (s) => `${s.toFixed(s < 10 ? 2 : 0)} s`, (b) => `${bytes_text(b)}/s`);
    const path = speeds.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
    shape_of(svg, "polyline", { points: path, fill: "none", stroke: colour(0), "stroke-width": 2 });
  };

  // ---- the map of bytes: each rectangle's area is the bytes of a module, device or dtype
  const tiles_wanted = 40, tiles_max = 250;
  const tree_of = (key) => {
    const top_node = { name: "", bytes: 0, children: new Map() };
    for (const t of targets) {
      if (t.bytes === 0) continue;
      const parts = key === "module" ? t.name.split(".") : [t[key], ...t.name.split(".")];
      let node = top_node;
      node.bytes += t.bytes;
      for (const part of parts) {
        if (!node.children.has(part)) {
          node.children.set(part, { name: part, label: part, bytes: 0, children: new Map() });
        }
        node = node.children.get(part);
        node.bytes += t.bytes;
      }
      node.name = t.name;
    }
    return top_node;
  };
  // Squarified: rows of rectangles, each as near to a square as can be (Bruls and others, 2000).
  const squarify = (items, x, y, w, h) => {
    const placed = [];
    let total = items.reduce((sum, item) => sum + item.bytes, 0);
    let first = 0;
    while (first < items.length && w > 0 && h > 0) {
      const side = Math.min(w, h), scale = w * h / total;
      let last = first, sum = 0, worst = Infinity;
      for (; last < items.length; ++last) {
        const next = sum + items[last].bytes;
        const thick = next * scale / side;
        const ratio = Math.max(items[first].bytes * scale / thick / thick,
                               thick * thick / (items[last].bytes * scale));
        if (ratio > worst) break;
        worst = ratio;
        sum = next;
      }
      const thick = sum * scale / side;
      let along = 0;
      for (let i = first; i < last; ++i) {
        const long = items[i].bytes * scale / thick;
        placed.push(w >= h ? [items[i], x, y + along, thick, long]
                           : [items[i], x + along, y, long, thick]);
        along += long;
      }
      if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
      total -= sum;
      first = last;
    }
    return placed;
  };
  // Returns the children of a node. Replaces the largest ones by their own children until enough
  // are shown.
  const tiles_of = (node) => {
    const tiles = [...node.children.values()];
    while (tiles.length < tiles_wanted) {
      let largest = -1;
      tiles.forEach((tile, i) => {
        const fits = tile.children.size > 0 && tiles.length + tile.children.size <= tiles_max;
        if (fits && (largest < 0 || tile.bytes > tiles[largest].bytes)) largest = i;
      });
      if (largest < 0) break;
      const [opened] = tiles.splice(largest, 1);
      for (const child of opened.children.values()) {
        tiles.push({ ...child, label: `${opened.label}.${child.label}` });
      }
    }
    tiles.sort((a, b) => b.bytes - a.bytes);
    if (tiles.length <= tiles_max) return tiles;
    const rest = tiles.splice(tiles_max - 1);
    tiles.push({ label: `${count_text(rest.length)} others`, name: "", children: new Map(),
                 bytes: rest.reduce((sum, tile) => sum + tile.bytes, 0) });
    return tiles.sort((a, b) => b.bytes - a.bytes);
  };
  // Returns the length of the prefix that all labels share, which is not shown.
  const shared_prefix = (labels) => {
    let shared = 0;
    const first = labels[0] || "";
    for (let dot = first.indexOf("."); dot >= 0; dot = first.indexOf(".", dot + 1)) {
      if (!labels.every((label) => label.startsWith(first.slice(0, dot + 1)))) break;
      shared = dot + 1;
    }
    return shared;
  };
  const draw_map = (trail) => {
    const node = trail[trail.length - 1];
    const map = by_id("map"), path = by_id("map-path");
    path.replaceChildren(...trail.flatMap((step, i) => [
      el("button", { type: "button", onclick: () => draw_map(trail.slice(0, i + 1)) },
         i === 0 ? "all" : step.label), " "]), `${bytes_text(node.bytes)}`);
    const items = tiles_of(node);
    const shared = shared_prefix(items.filter((item) => item.name).map((item) => item.label));
    map.replaceChildren(...squarify(items, 0, 0, 100, 100).map(([item, x, y, w, h], i) => {
      const share = (100 * item.bytes / node.bytes).toFixed(1);
      const text = `${item.label}, ${bytes_text(item.bytes)}, ${share} %`;
      return el("button", {
        type: "button", title: text, "aria-label": text,
        style: `left:${x}%;top:${y}%;width:${w}%;height:${h}%;background:${colour(i)}`,
        onclick: () => {
          if (item.children.size > 0) draw_map([...trail, item]);
          else if (item.name) search_for(item.name);
        },
      }, w > 4 && h > 5 ? item.label.slice(item.name ? shared : 0) : "");
    }));
  };

  // ---- the table: the page contains only the visible rows
  const row_height = 28;
  const columns = [["name", "target"], ["kind", "kind"], ["shape", "shape"], ["dtype", "dtype"],
                   ["device", "device"], ["bytes", "bytes"], ["from", "origin"]];
  const body = by_id("rows"), space = el("div"), window_of_rows = el("div", { role: "presentation" });
  let shown = targets, sorted = ["index", 1], selected = -1;
  body.append(space, window_of_rows);

  const cells_of = (t) => [
    el("span", { class: "name", role: "cell", title: t.name }, t.name),
    el("span", { role: "cell", title: t.kind }, t.kind.replaceAll("_", " ")),
    el("span", { role: "cell" }, t.shape),
    el("span", { role: "cell", title: t.dtype }, t.dtype),
    el("span", { role: "cell" }, t.device),
    el("span", { class: "number", role: "cell" }, bytes_text(t.bytes)),
    el("span", { class: "name", role: "cell", title: t.from },
       t.from ? `${t.origin}: ${t.from}` : t.origin)];
  const show_rows = () => {
    space.style.height = `${shown.length * row_height}px`;
    const first = Math.max(0, Math.floor(body.scrollTop / row_height) - 5);
    const last = Math.min(shown.length, first + Math.ceil(body.clientHeight / row_height) + 10);
    window_of_rows.replaceChildren(...shown.slice(first, last).map((t, i) => el("div", {
      class: "row", role: "row", "aria-rowindex": first + i + 2, style: `top:${(first + i) * row_height}px`,
      "aria-selected": String(first + i === selected), onclick: () => select(first + i),
    }, ...cells_of(t))));
  };
  const filters = ["device", "origin", "dtype", "kind"];
  const apply = () => {
    const words = by_id("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = filters.map((key) => [key, by_id(`only-${key}`).value]).filter(([, v]) => v);
    shown = targets.filter((t) => wanted.every(([key, value]) => t[key] === value) &&
      words.every((word) => t.name.toLowerCase().includes(word) ||
                            t.from.toLowerCase().includes(word)));
    const [key, direction] = sorted;
    const compare = new Intl.Collator("en", { numeric: true }).compare;
    shown.sort((a, b) => direction * (typeof a[key] === "number" ? a[key] - b[key]
                                                                 : compare(a[key], b[key])));
    selected = -1;
    body.scrollTop = 0;
    by_id("grid").setAttribute("aria-rowcount", shown.length + 1);
    by_id("shown").textContent = `${count_text(shown.length)} of ${count_text(targets.length)}, ` +
      bytes_text(shown.reduce((sum, t) => sum + t.bytes, 0));
    show_rows();
  };
  const search_for = (text) => {
    by_id("search").value = text;
    apply();
    by_id("search").focus();
  };
  const source_item = (index, note) => {
    const source = data.sources[index];
    return el("li", {}, el("span", { class: "name" }, source[0]), el("br"),
              el("span", { class: "soft" }, `${data.words[source[2]]} ${source[3]}, ` +
                 `${data.shards[source[1]]} at ${count_text(source[4])}, ` +
                 `${bytes_text(source[5] - source[4])}${note}`));
  };
  const card = (title, ...children) => el("div", { class: "card" }, el("strong", {}, title),
                                          ...children);
  const arrow = (text) => el("span", { class: "arrow" }, `${text} →`);
  // Draws a recipe: sources, operations, target.
  const recipe_of = (t) => {
    const steps = [];
    if (t.boxes.length > 0) {
      const list = el("ol");
      const kernels = new Set();
      for (const [source, source_offset, target_offset, elements, decoding] of t.boxes) {
        const note = t.box_count === 1 ? "" : `; ${count_text(elements)} elements from ` +
          `${count_text(source_offset)} to ${count_text(target_offset)}`;
        if (decoding < 0) {
          list.append(source_item(source, note));
        } else {
          kernels.add(data.decodings[decoding][0]);
          data.decodings[decoding][1].forEach((s, i) => list.append(source_item(s, i ? "" : note)));
        }
      }
      if (t.box_count > t.boxes.length) {
        list.append(el("li", {}, `${count_text(t.box_count - t.boxes.length)} more boxes`));
      }
      steps.push(card(t.box_count === 1 ? "source" : `${count_text(t.box_count)} boxes`, list));
      steps.push(arrow(kernels.size ? `decoded by ${[...kernels].join(", ")}` : "copied"));
    }
    if (t.terms.length > 0) {
      const list = el("ol");
      for (const [factor, sources] of t.terms) {
        for (const source of sources) list.append(source_item(source, `; times ${factor}`));
      }
      steps.push(card("merged with", list), arrow("added"));
    }
    if (steps.length === 0) steps.push(card(t.origin, el("br"), t.from), arrow("gives"));
    steps.push(card("target", el("br"), el("span", { class: "name" }, t.name), el("br"),
                    el("span", { class: "soft" },
                       `${t.dtype} ${t.shape} on ${t.device}, ${bytes_text(t.bytes)}`)));
    return steps;
  };
  const select = (position) => {
    if (position < 0 || position >= shown.length) return;
    selected = position;
    const row_top = position * row_height;
    if (row_top < body.scrollTop) body.scrollTop = row_top;
    if (row_top + row_height > body.scrollTop + body.clientHeight) {
      body.scrollTop = row_top + row_height - body.clientHeight;
    }
    show_rows();
    by_id("recipe").replaceChildren(...recipe_of(shown[position]));
  };

  const make_table = () => {
    by_id("head").append(...columns.map(([key, text]) => {
      const cell = el("span", { role: "columnheader", "aria-sort": "none",
                                class: key === "bytes" ? "number" : "" });
      const button = el("button", { type: "button" }, text);
      button.onclick = () => {
        sorted = [key, sorted[0] === key ? -sorted[1] : key === "bytes" ? -1 : 1];
        for (const other of by_id("head").children) other.setAttribute("aria-sort", "none");
        cell.setAttribute("aria-sort", sorted[1] > 0 ? "ascending" : "descending");
        apply();
      };
      cell.append(button);
      return cell;
    }));
    for (const key of filters) {
      const values = [...new Set(targets.map((t) => t[key]))].sort();
      const choice = by_id(`only-${key}`);
      choice.append(...values.map((value) => el("option", { value }, value)));
      choice.onchange = apply;
      if (values.length < 2) choice.hidden = true;
    }
    by_id("search").oninput = apply;
    body.onscroll = show_rows;
    body.onkeydown = (event) => {
      const page = Math.floor(body.clientHeight / row_height);
      const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page,
                      Home: -shown.length, End: shown.length };
      if (!(event.key in steps)) return;
      event.preventDefault();
      select(Math.min(shown.length - 1, Math.max(0, selected + steps[event.key])));
    };
    new ResizeObserver(show_rows).observe(body);
    apply();
  };

  draw_memory();
  draw_speed();
  const by = by_id("map-by");
  by.onchange = () => draw_map([tree_of(by.value)]);
  by.onchange();
  make_table();
})();
