// Decisions: kept in this browser as they are made, and saved as a file for pin_labels.

const VERDICTS = { accept: 'accepted', reject: 'rejected', relabel: 'relabelled', none: 'none of the classes' };
const MARKS = { accept: '✓', reject: '✕', relabel: '✎', none: '∅' };
const decided = new Map(); // place -> { verdict, label, audit, at, by }
const FILE_NAME = `decisions-${DATA.run}.json`;
const STORE = `pencil_scale review ${DATA.run} ${DATA.created}`;
const placeOf = new Map(S.id.map((id, place) => [id, place]));
const listeners = [];
const MANY = 2000; // from this many decisions on, storing all of them at every key would be noticeable

function labelOf(place, verdict, chosen) {
  if (verdict === 'accept') return S.predicted_label[place];
  if (verdict === 'reject') return S.changed(place) ? S.given_label[place] : null;
  return verdict === 'relabel' ? chosen : null;
}

// The verdict that gives a sample this class; null: none of the classes.
function verdictFor(place, label) {
  if (label === null) return 'none';
  if (label === S.predicted_label[place]) return 'accept';
  return label === S.given_label[place] ? 'reject' : 'relabel';
}

function record(place, verdict, chosen = null, audit = null) {
  const label = labelOf(place, verdict, chosen);
  const former = decided.get(place);
  const by = byId('by').value.trim();
  decided.set(place, { verdict, label, audit: audit || (former && former.audit) || null, at: new Date().toISOString(), by });
}

function undo(place) {
  if (decided.delete(place)) notify();
}

function notify() {
  for (const listener of listeners) listener();
  clearTimeout(notify.timer);
  if (decided.size < MANY) keep();
  else notify.timer = setTimeout(keep, 500);
}

function entries() {
  const name = byId('by').value.trim(); // of those who typed it only after judging, too
  return [...decided].sort((a, b) => a[0] - b[0]).map(([place, made]) => ({
    sample_id: S.id[place],
    class: made.label === null ? null : className(made.label),
    verdict: made.verdict,
    given: className(S.given_label[place]),
    suggested: className(S.predicted_label[place]),
    by: made.by || name || null,
    at: made.at,
    note: VERDICTS[made.verdict] + (made.audit ? ', in an audit' : ''),
    ...(made.audit ? { audit: made.audit, confidence: Number(S.confidence[place].toFixed(4)) } : {}),
  }));
}

function asFile() {
  const drawn = (stratum) => DATA.audit.stratum.filter((one) => one === stratum).length;
  const audit = Object.fromEntries(['changed', 'unchanged'].map(
    (stratum) => [stratum, { all: DATA.audit[stratum], drawn: drawn(stratum) }]));
  return { kind: 'pencil_scale decisions', version: 3, run: DATA.run, page: DATA.created, audit, decisions: entries() };
}

function take(file) {
  let missing = 0;
  for (const entry of file.decisions || []) {
    const place = placeOf.get(entry.sample_id);
    const label = entry.class === null ? null : DATA.classes.indexOf(entry.class);
    if (place === undefined || label === -1 || !(entry.verdict in VERDICTS)) missing += 1;
    else decided.set(place, { verdict: entry.verdict, label, audit: entry.audit || null, at: entry.at, by: entry.by || '' });
  }
  return missing;
}

function keep() {
  // A browser may forbid storage to local pages: then decisions are kept only in the saved file.
  try {
    localStorage.setItem(STORE, JSON.stringify({ decisions: entries() }));
    localStorage.setItem('pencil_scale reviewer', byId('by').value);
  } catch (error) {
    byId('tally').title = `not kept in this browser: ${error.message}`;
  }
}

function recall() {
  try {
    byId('by').value = localStorage.getItem('pencil_scale reviewer') || '';
    const kept = localStorage.getItem(STORE);
    if (kept) take(JSON.parse(kept));
  } catch (error) {
    byId('tally').title = `no decisions restored from this browser: ${error.message}`;
  }
}

function save() {
  const text = JSON.stringify(asFile(), null, 1);
  const link = add(null, 'a', { href: URL.createObjectURL(new Blob([text], { type: 'application/json' })) });
  link.download = FILE_NAME;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function load(input) {
  const [file] = input.files;
  if (!file) return;
  try {
    const missing = take(JSON.parse(await file.text()));
    notify();
    byId('shown').textContent = missing ? `not on this page: the samples or classes of ${many(missing, 'decision')}` : '';
  } catch (error) {
    byId('shown').textContent = `${file.name}: not a file of decisions (${error.message})`;
  }
  input.value = '';
}

function showTally() {
  const counts = {};
  for (const { verdict } of decided.values()) counts[verdict] = (counts[verdict] || 0) + 1;
  const parts = Object.keys(VERDICTS).filter((verdict) => counts[verdict]).map((verdict) => `${whole(counts[verdict])} ${VERDICTS[verdict]}`);
  byId('tally').textContent = decided.size ? `${whole(decided.size)} judged: ${parts.join(', ')}` : 'Nothing judged yet';
  byId('save').disabled = decided.size === 0;
}
