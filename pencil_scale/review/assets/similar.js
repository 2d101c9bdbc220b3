// More like this: samples that look like the current one, judged together; and "none of these" for outliers.

const SIMILAR = DATA.similar && {
  num: DATA.similar.num, places: unpack(DATA.similar.places), outlier: unpack(DATA.similar.outlier), score: unpack(DATA.similar.score),
};
const isOutlier = (place) => SIMILAR !== null && SIMILAR.outlier[place] === 1;
const outlierScore = (place) => SIMILAR.score[place] / 32767.5;
const GROUP = { place: null, out: new Set() }; // the current sample, and those like it that are not in its group

function likeThis(place) {
  if (SIMILAR === null) return [];
  const found = Array.from(SIMILAR.places.subarray(place * SIMILAR.num, (place + 1) * SIMILAR.num)).filter((other) => other >= 0);
  if (GROUP.place !== place) Object.assign(GROUP, { place, out: new Set(found.filter((other) => decided.has(other))) });
  return found;
}

// What a verdict on the group means for one sample: accept its suggested class, reject it for its given class,
// or this class for all (null: none of the classes).
function groupVerdict(place, verdict, label) {
  if (verdict === 'relabel') return verdictFor(place, label);
  return verdict === 'reject' && S.changed(place) ? 'reject' : 'accept';
}

function judgeGroup(place, verdict, label = null) {
  for (const one of [place, ...likeThis(place).filter((other) => !GROUP.out.has(other))]) record(one, groupVerdict(one, verdict, label), label);
  GROUP.place = null;
  notify();
  if (STATE.cursor < STATE.view.length - 1) point(STATE.cursor + 1);
}

function moreLikeThis(pane, place) {
  const found = likeThis(place);
  if (!found.length) return;
  const block = add(pane, 'section', { class: 'like' });
  add(block, 'h3', { text: 'More like this' });
  const strip = add(block, 'div', { class: 'strip' });
  for (const other of found) {
    const now = className(S.predicted_label[other]);
    const title = `${S.id[other]}: ${S.changed(other) ? `${className(S.given_label[other])} → ${now}` : now}; click to take it out of the group, or back in`;
    const flip = () => { if (!GROUP.out.delete(other)) GROUP.out.add(other); inspect(); };
    const tile = add(strip, 'button', { type: 'button', class: 'tile', title, 'aria-pressed': String(!GROUP.out.has(other)), onclick: flip });
    picture(tile, other);
    const made = decided.get(other);
    add(tile, 'span', { class: 'name', text: `${made ? `${MARKS[made.verdict]} ` : ''}${S.changed(other) ? '→ ' : ''}${shortName(S.predicted_label[other], 12)}` });
  }
  const num = found.length - GROUP.out.size + 1;
  add(block, 'p', { class: 'hint', text: `This sample and the marked ones, ${num} in all:` });
  const buttons = add(block, 'div', { class: 'verdicts' });
  for (const [verdict, text, title] of [['accept', 'Accept all', 'the suggested class of each is right'],
    ['reject', 'Reject all', 'the given class of each is right'], ['relabel', 'Relabel all', 'one class for all, or none of them']]) {
    const act = verdict === 'relabel' ? () => pickClass(place, (_, label) => judgeGroup(place, verdict, label)) : () => judgeGroup(place, verdict);
    add(buttons, 'button', { type: 'button', class: 'verdict', text, title, onclick: act });
  }
}
