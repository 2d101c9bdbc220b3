// The transition matrix: all cells if there are few classes, otherwise an overview and a zoom.

const MOST_SHOWN = 40;
const ZOOMED = 20;

function transitionTotals() {
  const table = cells(DATA.transitions);
  const [given, left, came] = [0, 1, 2].map(() => new Float64Array(DATA.classes.length));
  const flows = [];
  const of = new Map();
  table.num.forEach((num, place) => {
    const [first, second] = [table.first[place], table.second[place]];
    given[first] += num;
    of.set(first * DATA.classes.length + second, num);
    if (first === second) return;
    left[first] += num;
    came[second] += num;
    flows.push({ first, second, num });
  });
  return { given, left, came, flows, num: (first, second) => of.get(first * DATA.classes.length + second) || 0 };
}

function drawMatrix(parent, shown, totals, choose) {
  parent.replaceChildren();
  const longest = Math.max(...shown.map((number) => className(number).length));
  const margin = 14 + 6.2 * Math.min(longest, 16);
  const side = Math.max(13, Math.min(56, 600 / shown.length));
  const numbers = side >= 30;
  const size = margin + side * shown.length + 4;
  const svg = draw(parent, 'svg', { class: 'matrix', viewBox: `0 0 ${size} ${size}`, role: 'img', 'aria-label': 'Transition matrix' });
  svg.style.maxWidth = `${size}px`;
  shown.forEach((number, place) => {
    const middle = margin + side * (place + 0.5);
    draw(svg, 'text', { class: 'axis', x: margin - 6, y: middle + 4, 'text-anchor': 'end' }, shortName(number, 16));
    draw(svg, 'text', { class: 'axis', transform: `translate(${middle + 4} ${margin - 6}) rotate(-90)` }, shortName(number, 16));
  });
  shown.forEach((first, row) => shown.forEach((second, column) => {
    const num = totals.num(first, second);
    const share = totals.given[first] ? num / totals.given[first] : 0;
    const cell = draw(svg, 'g', { class: first === second ? 'cell kept' : 'cell changed', 'data-pair': `${first},${second}` });
    draw(cell, 'title', {}, `${className(first)} → ${className(second)}: ${whole(num)} (${percent(share)} of the class)`);
    const place = { x: margin + side * column, y: margin + side * row, width: side - 1, height: side - 1, rx: side > 20 ? 2 : 0 };
    draw(cell, 'rect', { ...place, class: 'ground' });
    if (num) draw(cell, 'rect', { ...place, class: 'heat', 'fill-opacity': (0.08 + 0.92 * Math.sqrt(share)).toFixed(3) });
    if (num && numbers && share >= 0.0005) {
      const text = (100 * share).toFixed(share < 0.0995 ? 1 : 0);
      draw(cell, 'text', { class: Math.sqrt(share) > 0.62 ? 'number bright' : 'number', x: place.x + side / 2, y: place.y + side / 2 + 4, 'text-anchor': 'middle' }, text);
    }
    if (num) cell.addEventListener('click', () => choose(first, second));
  }));
}

function mostInvolved(totals) {
  const order = DATA.classes.map((_, number) => number);
  order.sort((a, b) => totals.left[b] + totals.came[b] - totals.left[a] - totals.came[a]);
  return order.slice(0, ZOOMED).sort((a, b) => a - b);
}

function partners(totals, number) {
  const mass = new Map();
  for (const { first, second, num } of totals.flows) {
    if (first === number) mass.set(second, (mass.get(second) || 0) + num);
    if (second === number) mass.set(first, (mass.get(first) || 0) + num);
  }
  const found = [...mass].sort((a, b) => b[1] - a[1]).slice(0, ZOOMED - 1).map(([other]) => other);
  return [number, ...found];
}

function overview(totals, zoom) {
  const num = DATA.classes.length;
  const canvas = byId('overview');
  canvas.width = num;
  canvas.height = num;
  const pen = canvas.getContext('2d');
  const colour = getComputedStyle(document.documentElement).getPropertyValue('--accent').trim();
  const spot = Math.max(1, Math.ceil(num / 400));
  pen.fillStyle = colour;
  for (const flow of totals.flows) {
    pen.globalAlpha = Math.min(1, 0.25 + Math.sqrt(flow.num / totals.given[flow.first]));
    pen.fillRect(flow.second, flow.first, spot, spot);
  }
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    const along = (value, size) => Math.max(0, Math.min(num - 1, Math.floor((value / size) * num)));
    return [along(event.clientY - box.top, box.height), along(event.clientX - box.left, box.width)];
  };
  canvas.addEventListener('mousemove', (event) => {
    const [first, second] = at(event);
    byId('overview-hint').textContent = `${className(first)} → ${className(second)}: ${whole(totals.num(first, second))}`;
  });
  canvas.addEventListener('click', (event) => zoom(at(event)[0]));
}

function matrix(totals, choose) {
  const parent = byId('matrix');
  const all = DATA.classes.map((_, number) => number);
  if (!DATA.counts.labels) return empty(parent, 'No label has been trained yet.');
  if (all.length <= MOST_SHOWN) return drawMatrix(parent, all, totals, choose);
  byId('zoom').hidden = false;
  const select = byId('zoom-class');
  add(select, 'option', { value: '', text: `the ${ZOOMED} classes with the most changes` });
  for (const number of all) add(select, 'option', { value: number, text: className(number) });
  const show = () => {
    const shown = select.value === '' ? mostInvolved(totals) : partners(totals, Number(select.value));
    drawMatrix(parent, shown, totals, choose);
  };
  select.addEventListener('change', show);
  overview(totals, (number) => { select.value = String(number); show(); });
  const out = DATA.transitions.num_left_out;
  const more = out ? ` Left out: the ${many(out, 'smallest cell')}.` : '';
  byId('overview-hint').textContent = `All ${whole(all.length)} classes; click a point to zoom in.${more}`;
  return show();
}
