"use strict";
// What all pages share: the server's address, its key, its model and its state. Text goes into the page by textContent only.
const $ = id => document.getElementById(id);
const STATE_EVERY_MS = 5000;
let key = sessionStorage.getItem("api_key") || "", typedKey = false;

function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
function authorized(headers = {}) { return key ? { ...headers, authorization: `Bearer ${key}` } : headers; }
async function ask(path, options = {}) {
  const used = key;
  const answer = await fetch(path, { cache: "no-store", ...options, headers: authorized(options.headers) });
  if (answer.ok) return answer;
  if (answer.status === 401 && used !== key) return ask(path, options);  // a key was typed meanwhile
  if (answer.status === 401) { askForKey(); throw new Error(typedKey ? "the API key is wrong" : "waiting for the API key"); }
  const told = await answer.json().catch(() => null);
  throw new Error(told?.error?.message || `the server answers ${answer.status}`);
}
function askForKey() {
  $("login").hidden = false;
  $("login-said").textContent = typedKey ? "This key is wrong." : "This server asks for its API key.";
  $("login-said").className = typedKey ? "bad" : "";
}
// Nothing is wrong before a key was typed.
function kindOfError() { return $("login").hidden || typedKey ? "bad" : "faint"; }
function showState(text, kind) { $("state").textContent = text; $("state").className = kind; }
async function lookAtState() {
  try {
    const health = await fetch("health", { cache: "no-store" });
    if (!health.ok) { showState("not serving", "bad"); return; }
    const loads = await (await ask("v1/loads")).json();
    const counts = `${loads.num_running_reqs} running, ${loads.num_waiting_reqs} waiting`;
    showState(loads.paused ? `paused, ${counts}` : `serving, ${counts}`, loads.paused ? "bad" : "good");
  } catch (error) { showState(error.message, kindOfError()); }
}
async function keepState() { if (!document.hidden && $("login").hidden) await lookAtState(); setTimeout(keepState, STATE_EVERY_MS); }
// Links to answers that need the key: a browser sends none, so the page fetches them and opens a copy.
async function openWithKey(event) {
  if (!key) return;
  event.preventDefault();
  const shown = window.open("", "_blank");
  try {
    const answer = await ask(event.currentTarget.getAttribute("href"));
    shown.location = URL.createObjectURL(new Blob([await answer.text()], { type: "text/plain" }));
  } catch (error) { shown.close(); showState(error.message, "bad"); }
}
const whenKeyIsGiven = [];
document.querySelectorAll("nav a[data-key]").forEach(link => link.addEventListener("click", openWithKey));
$("login").addEventListener("submit", async event => {
  event.preventDefault();
  [key, typedKey] = [$("key").value, true];
  sessionStorage.setItem("api_key", key);
  $("login").hidden = true;
  lookAtState();
  whenKeyIsGiven.forEach(again => again());
});
