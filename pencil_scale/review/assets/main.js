// Entry point: keys, clicks, and what to redraw after each.

function current() {
  return STATE.view.length ? STATE.view[STATE.cursor] : null;
}

function judge(verdict) {
  const place = current();
  if (place === null) return;
  if (STATE.mode === 'audit' && (verdict === 'accept' || verdict === 'reject')) return; // it hides which is which
  if (verdict === 'undo') undo(place);
  else if (verdict === 'relabel') pickClass(place);
  else conclude(place, verdict);
}

function conclude(place, verdict, chosen = null) {
  record(place, verdict, chosen, STATE.mode === 'audit' ? strata.get(place) : null);
  notify();
  if (STATE.cursor < STATE.view.length - 1) point(STATE.cursor + 1);
}

function chosenClass(place, label) {
  conclude(place, verdictFor(place, label), label);
}

// --- choosing a class --------------------------------------------------------------------------------

const picker = byId('picker');
const MOST_OFFERED = 60;

function offered(place, text) {
  const likely = STATE.mode === 'audit' ? [] : Array.from(S.top_labels.subarray(place * S.topK, (place + 1) * S.topK));
  const rest = DATA.classes.map((_, number) => number).filter((number) => !likely.includes(number));
  const wanted = text.trim().toLowerCase();
  const found = [...likely, ...rest].filter((number) => className(number).toLowerCase().includes(wanted));
  if (wanted) found.sort((a, b) => rankOf(a, wanted) - rankOf(b, wanted));
  return [...found.slice(0, MOST_OFFERED), null];
}

function rankOf(number, wanted) {
  const name = className(number).toLowerCase();
  return name === wanted ? 0 : name.startsWith(wanted) ? 1 : 2;
}

function pickClass(place, done = chosenClass) {
  const state = { place, options: [], chosen: 0 };
  const leave = () => {
    byId('picker-text').blur(); // otherwise it would still receive the next key
    picker.close();
  };
  const choose = (label) => {
    leave();
    done(place, label);
  };
  const show = () => {
    state.options = offered(place, byId('picker-text').value);
    byId('picker-list').replaceChildren(...state.options.map((label, turn) => {
      const chosen = turn === state.chosen;
      const line = add(null, 'li', { role: 'option', class: label === null ? 'soft' : '', 'aria-selected': String(chosen), onclick: () => choose(label) });
      line.textContent = label === null ? 'none of these classes' : className(label);
      return line;
    }));
    const chosen = byId('picker-list').children[state.chosen];
    if (chosen) chosen.scrollIntoView({ block: 'nearest' });
  };
  byId('picker-text').value = '';
  // Text that matches no class selects nothing: "none of these classes" must be a deliberate choice.
  const start = () => { state.chosen = offered(place, byId('picker-text').value).length > 1 ? 0 : -1; show(); };
  byId('picker-text').oninput = start;
  picker.onkeydown = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      event.preventDefault();
      state.chosen = (state.chosen + step + state.options.length) % state.options.length;
      show();
    }
    if (event.key === 'Escape') {
      event.preventDefault();
      leave();
    }
    if (event.key === 'Enter') {
      event.preventDefault();
      if (state.chosen >= 0) choose(state.options[state.chosen]);
    }
  };
  picker.showModal();
  start();
}

// --- keys and clicks ---------------------------------------------------------------------------------

const KEYS = {
  a: () => judge('accept'), r: () => judge('reject'), l: () => judge('relabel'), u: () => judge('undo'), n: () => judge('none'),
  1: () => judgeBlind(0), 2: () => judgeBlind(1),
  j: () => point(STATE.cursor + 1), ArrowRight: () => point(STATE.cursor + 1),
  k: () => point(STATE.cursor - 1), ArrowLeft: () => point(STATE.cursor - 1),
  ArrowDown: () => point(STATE.cursor + STATE.columns), ArrowUp: () => point(STATE.cursor - STATE.columns),
  s: () => { if (decided.size) save(); }, '?': () => byId('help').showModal(),
};

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector('dialog[open]')) return;
  if (event.target.matches('input, select, textarea')) return;
  const name = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  const inBench = byId('bench').getBoundingClientRect().top < window.innerHeight / 2;
  if (!(name in KEYS) || (name.startsWith('Arrow') && !inBench)) return;
  event.preventDefault();
  if (!inBench && name !== '?') byId('bench').scrollIntoView();
  KEYS[name]();
}

function choose(given, suggested) {
  setMode('review');
  clearFilters();
  byId('f-given').value = given === null ? '' : String(given);
  byId('f-suggested').value = suggested === null ? '' : String(suggested);
  renew();
  byId('bench').scrollIntoView({ behavior: 'smooth' });
}

function clearFilters() {
  byId('filters').reset();
}

function setMode(mode) {
  STATE.mode = mode;
  for (const name of ['review', 'audit']) byId(`tab-${name}`).setAttribute('aria-selected', String(name === mode));
  showAudit();
  renew();
}

function sinceSection() {
  if (!byId('since')) return;
  const { moved = 0, labels = 0, flagged = 0, cleared = 0 } = DATA.counts;
  const fresh = DATA.counts.new || 0;
  const parts = [`${whole(moved)} of ${many(labels - fresh, 'earlier label')} changed`,
    `${whole(flagged)} changed for the first time`, `${whole(cleared)} returned to the given class`,
    many(fresh, 'new label')];
  byId('since-text').textContent = `${parts.join('; ')}.`;
  const table = cells(DATA.moves);
  const moves = Array.from(table.num, (num, place) => ({ first: table.first[place], second: table.second[place], num }));
  const show = (_, second) => { choose(null, second); byId('f-kind').value = 'moved'; renew(); };
  flowList(byId('since-moves'), moves.slice(0, 6), () => 0, show, 'No label has changed since.');
}

function fillSelects() {
  for (const id of ['f-given', 'f-suggested']) {
    for (const [number, name] of DATA.classes.entries()) add(byId(id), 'option', { value: number, text: name });
  }
}

function start() {
  const totals = transitionTotals();
  matrix(totals, choose);
  flowList(byId('flows'), totals.flows.slice(0, 12), (first) => totals.given[first], choose, 'No label has changed.');
  classTable(byId('by-class'), totals, choose);
  curves(byId('curves'));
  sinceSection();
  fillSelects();
  recall();
  listeners.push(showTally, redress, inspect, showAudit);
  showTally();
  renew();
  list.style.setProperty('--picture', `${CARD.picture}px`);
  list.addEventListener('scroll', () => requestAnimationFrame(fill), { passive: true });
  new ResizeObserver(() => arrange()).observe(list);
  byId('filters').addEventListener('input', renew);
  byId('filters').addEventListener('submit', (event) => event.preventDefault());
  byId('f-clear').addEventListener('click', () => { clearFilters(); renew(); });
  byId('tab-review').addEventListener('click', () => setMode('review'));
  byId('tab-audit').addEventListener('click', () => setMode('audit'));
  byId('file-name').textContent = FILE_NAME;
  byId('save').addEventListener('click', save);
  byId('load').addEventListener('click', () => byId('load-file').click());
  byId('load-file').addEventListener('change', (event) => load(event.target));
  byId('by').addEventListener('change', keep);
  byId('open-help').addEventListener('click', () => byId('help').showModal());
  window.addEventListener('pagehide', keep);
  document.addEventListener('keydown', pressed);
  document.documentElement.dataset.ready = 'yes';
}

start();
