// Keeps the live page's feed open, hands each frame to page.js, and says how fresh what is shown is.
"use strict";

const STALE_S = 5;          // without a frame, what is shown is said to be old
const REOPEN_MS = 2000;     // after a feed that was refused; one that broke off the browser reopens

let source = null;
let reopening = 0;
let lastFrameMs = 0;

function open() {
  close();
  if (document.hidden) return;
  source = new EventSource("/live/feed");
  source.onmessage = (event) => {
    lastFrameMs = performance.now();
    frame = JSON.parse(event.data);
    show();
    tellFeed();
  };
  source.onerror = () => {
    if (source && source.readyState === EventSource.CLOSED) {
      reopening = setTimeout(open, REOPEN_MS);
    }
    tellFeed();
  };
}

function close() {
  clearTimeout(reopening);
  if (source) source.close();
  source = null;
}

function tellFeed() {
  const silent = (performance.now() - lastFrameMs) / 1000;
  const isStale = frame !== null && !document.hidden && silent > STALE_S;
  const [words, kind] = isStale ? ["no updates: the page is out of date", "bad"] : feedState();
  document.body.classList.toggle("stale", isStale);
  setBadge($("feed"), isStale ? `no updates for ${duration(Math.floor(silent))}: out of date` : words, kind);
  setText($("said"), words); // apart from the badge: nobody wants to hear the seconds counted
}

function feedState() {
  if (document.hidden) return ["paused", ""];
  const state = source ? source.readyState : EventSource.CLOSED;
  if (state === EventSource.OPEN && frame) return ["live", "good"];
  if (state === EventSource.CLOSED) return ["refused (too many viewers?), trying again", "warn"];
  return [frame ? "connection lost, trying again" : "connecting", "warn"];
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) close(); else open();
  tellFeed();
});
setInterval(tellFeed, 1000);

open();
tellFeed();
