// The audit: estimates for all labels from random samples, judged with the same keys. The intervals are exact
// for draws without replacement; pencil_scale/review/audit.py computes the same.

const strata = new Map(DATA.audit.order.map((place, turn) => [place, DATA.audit.stratum[turn]]));
const inAudit = (place) => decided.has(place) && decided.get(place).audit !== null;

function logGamma(x) {
  // Lanczos approximation, g = 7: about 15 correct digits for x above 0.5; here x is at least 1.
  const parts = [676.5203681218851, -1259.1392167224028, 771.3234287776531, -176.6150291621406,
    12.507343278686905, -0.13857109526572012, 9.984369578019572e-6, 1.5056327351493116e-7];
  const shifted = x - 1;
  const sum = parts.reduce((total, part, place) => total + part / (shifted + place + 1), 0.9999999999998099);
  const base = shifted + 7.5;
  return 0.5 * Math.log(2 * Math.PI) + (shifted + 0.5) * Math.log(base) - base + Math.log(sum);
}

const logChoose = (n, k) => logGamma(n + 1) - logGamma(k + 1) - logGamma(n - k + 1);

function chanceOfAtLeast(num, judged, having, of) {
  let chance = 0;
  for (let k = Math.max(num, judged - (of - having)); k <= Math.min(judged, having); k += 1) {
    chance += Math.exp(logChoose(having, k) + logChoose(of - having, judged - k) - logChoose(of, judged));
  }
  return chance;
}

function fewest(num, judged, of, tail) {
  let [low, high] = [num, of - (judged - num)];
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if (chanceOfAtLeast(num, judged, middle, of) > tail) high = middle;
    else low = middle + 1;
  }
  return low;
}

function interval(num, judged, of, confidence = 0.95) {
  if (!of || !judged) return [0, 1];
  const tail = (1 - confidence) / 2;
  return [fewest(num, judged, of, tail) / of, (of - fewest(judged - num, judged, of, tail)) / of];
}

function judgedSoFar() {
  const found = { changed: { right: 0, judged: 0, all: DATA.audit.changed }, unchanged: { right: 0, judged: 0, all: DATA.audit.unchanged } };
  for (const place of DATA.audit.order) {
    if (!inAudit(place)) continue;
    const stratum = found[strata.get(place)];
    stratum.judged += 1;
    if (decided.get(place).label === S.predicted_label[place]) stratum.right += 1;
  }
  return found;
}

function estimates() {
  const { changed, unchanged } = judgedSoFar();
  const wrong = unchanged.judged - unchanged.right;
  const parts = [[changed.judged - changed.right, changed], [wrong, unchanged]].filter(([, one]) => one.all);
  const total = parts.reduce((sum, [, one]) => sum + one.all, 0) || 1;
  const mean = (side) => parts.reduce((sum, [num, one]) => sum + one.all * interval(num, one.judged, one.all, 0.975)[side], 0) / total;
  const share = parts.reduce((sum, [num, one]) => sum + (one.all * num) / one.judged, 0) / total;
  return {
    precision: { share: changed.right / changed.judged, range: interval(changed.right, changed.judged, changed.all), ...changed },
    missed: { share: wrong / unchanged.judged, range: interval(wrong, unchanged.judged, unchanged.all), ...unchanged },
    left: { share, range: [mean(0), mean(1)] },
  };
}

function gauge(parent, name, one, detail) {
  const block = add(parent, 'div', { class: 'gauge' });
  add(block, 'p', { class: 'gauge-name', text: name });
  add(block, 'p', { class: 'gauge-value', text: Number.isFinite(one.share) ? percent(one.share) : '–' });
  const svg = draw(block, 'svg', { class: 'range', viewBox: '0 0 200 10', preserveAspectRatio: 'none', role: 'img', 'aria-label': '95 % interval' });
  draw(svg, 'rect', { class: 'whole', width: 200, height: 10 });
  draw(svg, 'rect', { class: 'likely', x: 200 * one.range[0], width: Math.max(1, 200 * (one.range[1] - one.range[0])), height: 10 });
  if (Number.isFinite(one.share)) draw(svg, 'rect', { class: 'middle', x: 200 * one.share - 0.75, width: 1.5, height: 10 });
  add(block, 'p', { class: 'gauge-range', text: `95 % interval ${percent(one.range[0])} to ${percent(one.range[1])}` });
  add(block, 'p', { class: 'hint', text: detail });
}

// The audit is blind: it does not say which of two classes was given, which is new, or whether the label changed.

function twoClasses(place) {
  const next = (S.predicted_label[place] + 1) % DATA.classes.length;
  const other = S.changed(place) ? S.given_label[place] : (runnerUp(place, 0) || { label: next }).label;
  const pair = [S.predicted_label[place], other];
  return Math.imul(S.row[place] + 1, 0x9e3779b1) < 0 ? pair : pair.reverse();
}

function blindLines(parent, place, most) {
  const block = add(parent, 'div', { class: 'pair' });
  twoClasses(place).forEach((label, turn) => {
    add(block, 'p', { title: className(label) }, add(null, 'kbd', { text: turn + 1 }), add(null, 'span', { class: 'name', text: shortName(label, most) }));
  });
}

// A mark that says which class was chosen, and not whether it is the new one.
const neutral = (made) => made && made.label !== null ? { ...made, verdict: 'relabel' } : made;

function inspectBlind(pane, place) {
  const buttons = add(pane, 'div', { class: 'verdicts blind' });
  const made = decided.get(place);
  twoClasses(place).forEach((label, turn) => {
    const chosen = Boolean(made) && made.label === label;
    const button = add(buttons, 'button', { type: 'button', class: 'verdict relabel', 'aria-pressed': String(chosen), onclick: () => judgeBlind(turn) });
    add(button, 'kbd', { text: turn + 1 });
    button.append(` ${className(label)}`);
  });
  for (const [verdict, key, text] of [['relabel', 'L', 'Another class, or none'], ['undo', 'U', 'Undo']]) {
    const button = add(buttons, 'button', { type: 'button', class: 'verdict', onclick: () => judge(verdict) });
    add(button, 'kbd', { text: key });
    button.append(` ${text}`);
  }
  facts(pane, place);
  return null;
}

function judgeBlind(turn) {
  const place = current();
  if (place === null || STATE.mode !== 'audit') return;
  chosenClass(place, twoClasses(place)[turn]);
}

function showAudit() {
  const panel = byId('audit-panel');
  panel.hidden = STATE.mode !== 'audit';
  byId('filters').hidden = STATE.mode === 'audit';
  byId('ranked').hidden = STATE.mode === 'audit';
  byId('bench-title').textContent = STATE.mode === 'audit' ? 'Random samples' : 'Most doubtful samples';
  if (panel.hidden) return;
  const open = Boolean(panel.querySelector('details[open]'));
  panel.replaceChildren();
  const turns = DATA.audit.order.map(inAudit);
  const skipped = turns.slice(0, turns.lastIndexOf(true) + 1).filter((done) => !done).length;
  const advice = skipped
    ? `Skipped so far: ${whole(skipped)}. The intervals are valid only if you did not skip samples because they were difficult.`
    : 'Judge the samples in this order, do not skip any, and stop whenever you like: the intervals get narrower as you go.';
  add(panel, 'p', { class: 'lead', text: `Which class is right? Press 1 or 2, or L for another one. ${advice}` });
  const results = add(panel, 'details', open ? { open: '' } : {});
  add(results, 'summary', { text: `Estimates from ${many(turns.filter(Boolean).length, 'judgement')} (look when you are done: they hint at which class is new)` });
  const gauges = add(results, 'div', { class: 'gauges' });
  const { precision, missed, left } = estimates();
  gauge(gauges, 'Correct repairs', precision, `of ${many(precision.all, 'changed label')}; ${whole(precision.judged)} judged`);
  gauge(gauges, 'Wrong, unchanged', missed, `of ${many(missed.all, 'unchanged label')}; ${whole(missed.judged)} judged`);
  gauge(gauges, 'Wrong after repair', left, 'of all labels, after the repair');
}
