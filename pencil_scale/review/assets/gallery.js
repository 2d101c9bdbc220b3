// The samples: filtered and sorted as numbers; only the visible ones are elements of the page.

const PHOTO = 96; // pixels: a smaller picture is enlarged, with crisp pixels
const CARD = DATA.largest_px > PHOTO ? { width: 248, height: 318, picture: 224, letters: 19 } : { width: 190, height: 222, picture: 128, letters: 12 };
const STATE = { mode: 'review', view: [], cursor: 0, columns: 1 };
const cards = new Map(); // position in the view -> element
const list = byId('list');

function filtered() {
  const value = (id) => byId(`f-${id}`).value;
  const [kind, state, text] = [value('kind'), value('state'), value('text').trim().toLowerCase()];
  const given = value('given') === '' ? null : Number(value('given'));
  const suggested = value('suggested') === '' ? null : Number(value('suggested'));
  const [low, high] = [Number(value('low')), value('high') === '' ? 1 : Number(value('high'))];
  const found = [];
  for (let place = 0; place < (kind === 'outlier' ? S.num : DATA.num_listed); place += 1) {
    if (given !== null && S.given_label[place] !== given) continue;
    if (suggested !== null && S.predicted_label[place] !== suggested) continue;
    if (S.label_score[place] < low - 2e-5 || S.label_score[place] > high + 2e-5) continue;
    if (kind === 'changed' && !S.changed(place)) continue;
    if (kind === 'kept' && S.changed(place)) continue;
    if (kind === 'outlier' && !isOutlier(place)) continue;
    if (kind === 'moved' && (S.before[place] < 0 || S.before[place] === S.predicted_label[place])) continue;
    if (state !== 'all' && decided.has(place) !== (state === 'done')) continue;
    if (text && !S.id[place].toLowerCase().includes(text)) continue;
    found.push(place);
  }
  return sorted(found, kind === 'outlier' && value('order') === 'doubt' ? 'far' : value('order'));
}

function sorted(places, order) {
  if (order === 'mixed') return places;
  const by = {
    doubt: (place) => S.label_score[place],
    margin: (place) => S.margin[place],
    sure: (place) => (S.changed(place) ? 0 : 2) - S.confidence[place],
    restless: (place) => -TRACES.numMoves(place),
    late: (place) => -S.last_change_epoch[place],
    far: (place) => (SIMILAR === null ? 0 : -SIMILAR.score[place]),
  }[order];
  const keys = new Map(places.map((place) => [place, by(place)]));
  return places.sort((a, b) => keys.get(a) - keys.get(b) || a - b);
}

function renew() {
  STATE.view = STATE.mode === 'audit' ? DATA.audit.order : filtered();
  STATE.cursor = STATE.mode === 'audit' ? Math.max(0, STATE.view.findIndex((place) => !inAudit(place))) : 0;
  for (const node of cards.values()) node.remove();
  cards.clear();
  const listed = byId('f-kind').value === 'outlier' ? 'outliers, the farthest from every class first' : `of ${whole(DATA.num_listed)} listed`;
  const total = `${whole(STATE.view.length)} ${STATE.mode === 'audit' ? 'drawn at random' : listed}`;
  byId('shown').textContent = total;
  list.scrollTop = 0;
  arrange();
  point(STATE.cursor);
}

function arrange() {
  STATE.columns = Math.max(1, Math.floor(list.clientWidth / CARD.width));
  byId('spacer').style.height = `${Math.ceil(STATE.view.length / STATE.columns) * CARD.height}px`;
  for (const node of cards.values()) node.remove();
  cards.clear();
  fill();
}

function fill() {
  const first = Math.max(0, Math.floor(list.scrollTop / CARD.height) - 1) * STATE.columns;
  const last = Math.min(STATE.view.length, Math.ceil((list.scrollTop + list.clientHeight) / CARD.height + 1) * STATE.columns);
  for (const [position, node] of cards) {
    if (position >= first && position < last) continue;
    node.remove();
    cards.delete(position);
  }
  for (let position = first; position < last; position += 1) {
    if (!cards.has(position)) cards.set(position, placed(position));
  }
  const none = list.querySelector('.empty');
  if (none) none.remove();
  if (!STATE.view.length) empty(list, nothingText());
}

function nothingText() {
  if (STATE.mode === 'audit') return 'No label was drawn for the audit: report.audit is 0, or no label has been trained.';
  return DATA.num_listed ? 'No listed sample matches. Clear a filter to see more.'
    : 'Nothing to review: no label has been trained, or report.listed is 0.';
}

function placed(position) {
  const place = STATE.view[position];
  const width = list.clientWidth / STATE.columns;
  const node = add(list, 'article', { class: 'card', role: 'option', onclick: () => point(position) });
  node.style.left = `${(position % STATE.columns) * width}px`;
  node.style.top = `${Math.floor(position / STATE.columns) * CARD.height}px`;
  node.style.width = `${width}px`;
  node.style.height = `${CARD.height}px`;
  const inner = add(node, 'div', { class: 'inner' });
  picture(inner, place);
  if (STATE.mode === 'audit') blindLines(inner, place, CARD.letters);
  else {
    pairLine(inner, place, CARD.letters);
    const foot = add(inner, 'div', { class: 'foot' });
    fate(foot, place);
    sparkline(foot, place);
  }
  dress(node, place, position);
  return node;
}

function dress(node, place, position) {
  const made = STATE.mode === 'audit' ? neutral(decided.get(place)) : decided.get(place);
  node.classList.toggle('current', position === STATE.cursor);
  node.setAttribute('aria-selected', String(position === STATE.cursor));
  for (const verdict of Object.keys(VERDICTS)) node.classList.toggle(verdict, Boolean(made) && made.verdict === verdict);
  const old = node.querySelector('.badge');
  if (old) old.remove();
  if (!made) return;
  const text = made.verdict === 'relabel' ? `${MARKS.relabel} ${shortName(made.label, 14)}` : MARKS[made.verdict];
  add(node, 'span', { class: 'badge', text, title: VERDICTS[made.verdict] });
}

function redress() {
  for (const [position, node] of cards) dress(node, STATE.view[position], position);
}

function picture(parent, place) {
  const url = DATA.thumbnails[place];
  if (!url) return add(parent, 'div', { class: 'picture none', text: 'no picture' });
  const image = add(parent, 'img', { class: 'picture', src: url, alt: '', decoding: 'async' });
  // A tiny picture is enlarged with crisp pixels: blurred, it could not be judged.
  image.addEventListener('load', () => image.classList.toggle('tiny', Math.max(image.naturalWidth, image.naturalHeight) <= PHOTO));
  return image;
}

// The most likely class that the label does not have, with its share; null if there is none.
function runnerUp(place, least = 0.005) {
  for (let rank = 0; rank < S.topK; rank += 1) {
    const [label, share] = [S.top_labels[place * S.topK + rank], S.top_shares[place * S.topK + rank]];
    if (label !== S.predicted_label[place] && share >= least) return { label, share };
  }
  return null;
}

function pairLine(parent, place, most = Infinity) {
  const block = add(parent, 'div', { class: 'pair' });
  const line = (kind, before, label, share, title) => {
    const node = add(block, 'p', { class: kind, title: `${className(label)}: ${title}` }, before);
    add(node, 'span', { class: 'name', text: shortName(label, most) });
    add(node, 'span', { class: 'share', text: percent(share, 0) });
  };
  const changed = S.changed(place);
  const other = changed ? { label: S.predicted_label[place], share: S.confidence[place] } : runnerUp(place);
  line(changed ? 'was' : 'is', '', S.given_label[place], S.label_score[place], 'probability that this given label is right');
  if (changed) line('is', add(null, 'span', { class: 'arrow', text: '→ ' }), other.label, other.share, 'probability that this new label is right');
  else if (other) line('was', 'maybe ', other.label, other.share, 'share of the next likely class');
}

function fate(parent, place) {
  const text = S.changed(place) ? 'changed' : 'kept';
  add(parent, 'span', { class: `fate ${text}`, text: isOutlier(place) ? `${text}, outlier` : text });
}

function role(place, label) {
  if (label === S.given_label[place]) return 'given';
  return label === S.predicted_label[place] ? 'suggested' : 'other';
}

function traceLines(svg, place, x, y) {
  const trace = TRACES.of(place);
  trace.forEach((now, step) => {
    const before = trace[Math.max(0, step - 1)];
    draw(svg, 'line', { class: `trace ${role(place, now.label)}`, x1: x(Math.max(0, step - 1)), y1: y(before.share), x2: x(step), y2: y(now.share) });
  });
  return trace;
}

function sparkline(parent, place) {
  if (!TRACES.epochs.length) return;
  const svg = draw(parent, 'svg', { class: 'spark', viewBox: '0 0 64 20', role: 'img', 'aria-label': 'how the label changed' });
  const width = Math.max(1, TRACES.epochs.length - 1);
  traceLines(svg, place, (step) => 1 + (62 * step) / width, (share) => 18.5 - 17 * share);
}

function point(position) {
  STATE.cursor = Math.max(0, Math.min(STATE.view.length - 1, position));
  if (STATE.view.length) {
    const top = Math.floor(STATE.cursor / STATE.columns) * CARD.height;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + CARD.height > list.scrollTop + list.clientHeight) list.scrollTop = top + CARD.height - list.clientHeight;
    fill();
  }
  redress();
  inspect();
}

function inspect() {
  const pane = byId('inspector');
  pane.replaceChildren();
  if (!STATE.view.length) return empty(pane, 'No sample selected.');
  const place = STATE.view[STATE.cursor];
  picture(pane, place);
  if (STATE.mode === 'audit') return inspectBlind(pane, place);
  pairLine(pane, place);
  fate(pane, place);
  const buttons = add(pane, 'div', { class: 'verdicts' });
  const none = isOutlier(place) ? [['none', 'N', 'None of these']] : [];
  for (const [verdict, key, text] of [['accept', 'A', 'Accept'], ['reject', 'R', 'Reject'], ['relabel', 'L', 'Relabel'], ['undo', 'U', 'Undo'], ...none]) {
    const made = decided.get(place);
    const chosen = made && (made.verdict === verdict || (verdict === 'relabel' && made.verdict === 'none' && !none.length));
    const button = add(buttons, 'button', { type: 'button', class: `verdict ${verdict}`, 'aria-pressed': String(Boolean(chosen)), onclick: () => judge(verdict) });
    add(button, 'kbd', { text: key });
    button.append(` ${text}`);
  }
  moreLikeThis(pane, place);
  distribution(pane, place);
  history(pane, place);
  facts(pane, place);
  return null;
}

function distribution(pane, place) {
  const block = add(pane, 'div', { class: 'shares' });
  for (let rank = 0; rank < S.topK; rank += 1) {
    const [label, share] = [S.top_labels[place * S.topK + rank], S.top_shares[place * S.topK + rank]];
    if (share < 0.0005) continue;
    add(block, 'span', { class: `name ${role(place, label)}`, text: shortName(label, 14), title: className(label) });
    const meter = draw(block, 'svg', { class: `meter ${role(place, label)}`, viewBox: '0 0 100 4', preserveAspectRatio: 'none' });
    draw(meter, 'rect', { width: 100 * share, height: 4 });
    add(block, 'span', { class: 'n', text: percent(share) });
  }
}

function history(pane, place) {
  if (!TRACES.epochs.length) return empty(pane, 'This run has no label history.');
  const svg = draw(pane, 'svg', { class: 'history', viewBox: '0 0 280 110', role: 'img', 'aria-label': 'how the label changed by epoch' });
  const width = Math.max(1, TRACES.epochs.length - 1);
  const [x, y] = [(step) => 4 + (272 * step) / width, (share) => 84 - 74 * share];
  for (const share of [0, 0.5, 1]) draw(svg, 'line', { class: 'grid', x1: 4, x2: 276, y1: y(share), y2: y(share) });
  const trace = traceLines(svg, place, x, y);
  let before = S.given_label[place];
  let freeFrom = -100;
  trace.forEach(({ label, share }, step) => {
    if (label !== before) {
      draw(svg, 'circle', { class: `dot ${role(place, label)}`, cx: x(step), cy: y(share), r: 3.5 });
      if (x(step) > freeFrom && x(step) < 250) {
        draw(svg, 'text', { class: 'tick', x: x(step) + 5, y: y(share) < 24 ? y(share) + 14 : y(share) - 5 }, shortName(label, 14));
        freeFrom = x(step) + 12 + 6 * Math.min(14, className(label).length);
      }
    }
    before = label;
  });
  draw(svg, 'text', { class: 'tick', x: 4, y: 103 }, `epoch ${TRACES.epochs[0]}`);
  draw(svg, 'text', { class: 'tick', x: 276, y: 103, 'text-anchor': 'end' }, String(TRACES.epochs[TRACES.epochs.length - 1]));
  return null;
}

function facts(pane, place) {
  const table = add(pane, 'dl', { class: 'facts' });
  const original = [['id', S.id[place]], ['key', S.key[place]], ['shard', S.shards[S.shard[place]]],
    ['member', S.member(place)], ['row', whole(S.row[place])]];
  const learned = [['score', S.label_score[place].toFixed(3)], ['confidence', S.confidence[place].toFixed(3)],
    ['margin', S.margin[place].toFixed(3)],
    ['outlier score', SIMILAR === null ? null : outlierScore(place).toFixed(3)],
    ['last change', S.last_change_epoch[place] < 0 ? null : `epoch ${S.last_change_epoch[place] + 1}`],
    [DATA.since ? `at ${DATA.since}` : '', S.before[place] < 0 ? null : className(S.before[place])]];
  for (const [name, text] of STATE.mode === 'audit' ? original : [...original, ...learned]) {
    if (text === null || text === '') continue;
    add(table, 'dt', { text: name });
    add(table, 'dd', { text });
  }
}
