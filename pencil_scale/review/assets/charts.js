// The charts: changes between classes and by class, and curves by epoch.

function empty(parent, text) {
  add(parent, 'p', { class: 'empty', text });
}

function flowList(parent, list, total, choose, none) {
  if (!list.length) return empty(parent, none);
  const most = list[0].num;
  for (const { first, second, num } of list) {
    const line = add(parent, 'button', { type: 'button', class: 'flow', onclick: () => choose(first, second) });
    const meter = draw(line, 'svg', { class: 'meter', viewBox: '0 0 100 4', preserveAspectRatio: 'none' });
    draw(meter, 'rect', { width: (100 * num) / most, height: 4 });
    add(line, 'span', { class: 'pair' },
      add(null, 'span', { class: 'was', text: className(first) }), ' → ',
      add(null, 'span', { class: 'is', text: className(second) }));
    const share = total(first);
    add(line, 'span', { class: 'count', text: whole(num) });
    add(line, 'span', { class: 'share', text: share ? percent(num / share) : '' });
  }
  return null;
}

function classTable(parent, totals, choose) {
  const order = DATA.classes.map((_, number) => number).filter((number) => totals.given[number] > 0);
  order.sort((a, b) => totals.left[b] / totals.given[b] - totals.left[a] / totals.given[a]);
  if (!order.length) return empty(parent, 'No label has been trained yet: train, then create this page again.');
  const table = add(parent, 'table', { class: 'classes' });
  const head = add(add(table, 'thead'), 'tr');
  for (const [text, kind] of [['class', ''], ['changed', 'wide'], ['', 'n'], ['given', 'n'], ['lost', 'n'],
    ['gained', 'n'], ['now', 'n']]) add(head, 'th', { text, class: kind, scope: 'col' });
  const body = add(table, 'tbody');
  for (const number of order) {
    const [given, left, came] = [totals.given[number], totals.left[number], totals.came[number]];
    const line = add(body, 'tr');
    add(add(line, 'th', { scope: 'row' }), 'button',
      { type: 'button', class: 'link', text: className(number), onclick: () => choose(number, null) });
    const meter = draw(add(line, 'td', { class: 'wide' }), 'svg',
      { class: 'meter', viewBox: '0 0 100 4', preserveAspectRatio: 'none' });
    draw(meter, 'rect', { width: (100 * left) / given, height: 4 });
    add(line, 'td', { class: 'n strong', text: percent(left / given) });
    for (const value of [given, left, came, given - left + came]) add(line, 'td', { class: 'n', text: whole(value) });
  }
  return null;
}

const BOX = { width: 420, height: 190, left: 44, right: 10, top: 14, bottom: 26 };

function frame(parent, title, note) {
  const figure = add(parent, 'figure', { class: 'curve' });
  add(figure, 'figcaption', {}, add(null, 'b', { text: title }), ' ', add(null, 'span', { text: note }));
  return draw(figure, 'svg', { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: 'img', 'aria-label': title });
}

function scale(low, high, from, to) {
  return (value) => from + ((value - low) / (high - low || 1)) * (to - from);
}

function steps(low, high) {
  const size = 10 ** Math.floor(Math.log10((high - low) / 2 || 1));
  const step = [1, 2, 5, 10].map((by) => by * size).find((by) => (high - low) / by <= 4);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(at);
  return { found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

function axes(svg, x, y, rangeX, rangeY, label) {
  const ticks = steps(...rangeY);
  for (const value of ticks.found) {
    draw(svg, 'line', { class: 'grid', x1: BOX.left, x2: BOX.width - BOX.right, y1: y(value), y2: y(value) });
    draw(svg, 'text', { class: 'tick', x: BOX.left - 6, y: y(value) + 4, 'text-anchor': 'end' }, label(value, ticks.digits));
  }
  for (const value of steps(...rangeX).found.filter((at) => Number.isInteger(at))) {
    draw(svg, 'text', { class: 'tick', x: x(value), y: BOX.height - 8, 'text-anchor': 'middle' }, String(value));
  }
}

function stageMarks(svg, x, epochs) {
  let before = null;
  for (const { epoch, stage } of epochs) {
    if (stage === before) continue;
    if (before !== null) draw(svg, 'line', { class: 'stage', x1: x(epoch - 0.5), x2: x(epoch - 0.5), y1: BOX.top, y2: BOX.height - BOX.bottom });
    draw(svg, 'text', { class: 'stage-name', x: x(epoch) + 2, y: BOX.top - 3 }, stage);
    before = stage;
  }
}

function curve(parent, title, note, lines, label, band = null) {
  const epochs = DATA.epochs;
  const values = lines.flatMap(({ name }) => epochs.map((one) => one[name])).filter((value) => value != null);
  if (band) values.push(...epochs.flatMap((one) => [one[band.low], one[band.high]]).filter((value) => value != null));
  const rangeX = [epochs[0].epoch, Math.max(epochs[epochs.length - 1].epoch, epochs[0].epoch + 1)];
  const rangeY = [Math.min(...values), Math.max(...values)];
  // A flat line gets room below: shares cannot exceed 100 %.
  if (rangeY[0] === rangeY[1]) rangeY[0] = Math.max(0, rangeY[1] - 0.1);
  if (rangeY[0] === rangeY[1]) rangeY[1] = 0.1;
  rangeY[1] += 0.09 * (rangeY[1] - rangeY[0]); // room for the names of the stages
  const x = scale(...rangeX, BOX.left, BOX.width - BOX.right);
  const y = scale(...rangeY, BOX.height - BOX.bottom, BOX.top);
  const svg = frame(parent, title, note);
  axes(svg, x, y, rangeX, rangeY, label);
  stageMarks(svg, x, epochs);
  if (band) {
    const known = epochs.filter((one) => one[band.low] != null);
    const there = known.map((one) => `${x(one.epoch)},${y(one[band.high])}`);
    const back = known.map((one) => `${x(one.epoch)},${y(one[band.low])}`).reverse();
    draw(svg, 'polygon', { class: 'band', points: [...there, ...back].join(' ') });
  }
  for (const { name, kind } of lines) {
    const points = epochs.filter((one) => one[name] != null).map((one) => `${x(one.epoch)},${y(one[name])}`);
    draw(svg, 'polyline', { class: `line ${kind}`, points: points.join(' ') });
    const last = points.length ? points[points.length - 1].split(',') : null;
    if (last) draw(svg, 'circle', { class: `dot ${kind}`, cx: last[0], cy: last[1], r: 3 });
  }
}

function scoreChart(parent) {
  const [kept, changed] = DATA.scores;
  const most = Math.max(1, ...kept.map((num, bin) => num + changed[bin]));
  const svg = frame(parent, 'Probability that the given label is right', 'changed labels in colour; square-root scale');
  const width = (BOX.width - BOX.left - BOX.right) / kept.length;
  const base = BOX.height - BOX.bottom;
  const tall = (num) => Math.sqrt(num / most) * (base - BOX.top);
  kept.forEach((num, bin) => {
    const left = BOX.left + bin * width;
    const [all, part] = [tall(num + changed[bin]), tall(num + changed[bin]) * (changed[bin] / Math.max(1, num + changed[bin]))];
    const bar = draw(svg, 'g');
    draw(bar, 'title', {}, `${(bin / kept.length).toFixed(2)} to ${((bin + 1) / kept.length).toFixed(2)}: ${whole(changed[bin])} changed, ${whole(num)} unchanged`);
    draw(bar, 'rect', { class: 'kept', x: left + 0.5, y: base - all, width: width - 1, height: all - part });
    draw(bar, 'rect', { class: 'changed', x: left + 0.5, y: base - part, width: width - 1, height: part });
  });
  for (const at of [0, 0.5, 1]) {
    draw(svg, 'text', { class: 'tick', x: BOX.left + at * (BOX.width - BOX.left - BOX.right), y: BOX.height - 8, 'text-anchor': 'middle' }, String(at));
  }
}

function reliabilityChart(parent) {
  const [num, sum, right] = DATA.reliability;
  const svg = frame(parent, 'Reliability', 'share of right labels by confidence, where the true class is known');
  const x = scale(0, 1, BOX.left, BOX.width - BOX.right);
  const y = scale(0, 1, BOX.height - BOX.bottom, BOX.top);
  axes(svg, x, y, [0, 1], [0, 1], (value) => percent(value, 0));
  draw(svg, 'polyline', { class: 'line quiet', points: `${x(0)},${y(0)} ${x(1)},${y(1)}` });
  const bins = num.map((of, bin) => ({ of, at: sum[bin] / of, share: right[bin] / of })).filter(({ of }) => of);
  draw(svg, 'polyline', { class: 'line loud', points: bins.map(({ at, share }) => `${x(at)},${y(share)}`).join(' ') });
  for (const { of, at, share } of bins) {
    const dot = draw(svg, 'circle', { class: 'dot loud', cx: x(at), cy: y(share), r: 3 });
    draw(dot, 'title', {}, `confidence ${at.toFixed(3)}: ${percent(share)} of ${many(of, 'label')} right`);
  }
}

function curves(parent) {
  const epochs = DATA.epochs;
  const knows = (name) => epochs.some((one) => one[name] != null);
  if (!epochs.length) empty(parent, 'This run has no metrics by epoch.');
  if (epochs.length && knows('corrected_label_accuracy')) {
    curve(parent, 'Correct labels', 'where the true class is known: repaired, and as given',
      [{ name: 'given_label_accuracy', kind: 'quiet' }, { name: 'corrected_label_accuracy', kind: 'loud' }],
      (value, digits) => percent(value, Math.max(0, digits - 2)),
      { low: 'corrected_label_accuracy_low', high: 'corrected_label_accuracy_high' });
  }
  if (epochs.length && knows('label_entropy')) {
    curve(parent, 'Label entropy', 'in nats: how uncertain the labels are on average',
      [{ name: 'label_entropy', kind: 'loud' }], (value, digits) => value.toFixed(digits));
  }
  if (epochs.length && knows('corrected_share')) {
    curve(parent, 'Changed labels', 'share of all labels', [{ name: 'corrected_share', kind: 'loud' }],
      (value, digits) => percent(value, Math.max(0, digits - 2)));
  }
  const clean = ['validation_accuracy', 'test_accuracy'].filter(knows);
  if (epochs.length && clean.length) {
    curve(parent, 'Network accuracy', 'on clean samples',
      clean.map((name, place) => ({ name, kind: place ? 'loud' : clean.length > 1 ? 'quiet' : 'loud' })),
      (value, digits) => percent(value, Math.max(0, digits - 2)));
  }
  if (DATA.counts.labels) scoreChart(parent);
  if (DATA.reliability) reliabilityChart(parent);
}
