"use strict";
// Renews the page in its place during a run, unless someone works in it or does not look at it.
(() => {
  const EVERY_MS = 2000;
  let stamp = "";
  const about = () => document.getElementById("live");
  const isUsed = () => document.hidden || document.querySelector("main")?.contains(document.activeElement);
  const put = (text) => {
    const next = new DOMParser().parseFromString(text, "text/html");
    const opened = [...document.querySelectorAll("details[open] > summary")].map((one) => one.textContent);
    document.title = next.title;
    document.querySelector("main").replaceWith(next.querySelector("main"));
    for (const one of document.querySelectorAll("details > summary")) {
      one.parentElement.open = opened.includes(one.textContent);
    }
    window.enhance();
  };
  const renew = async () => {
    try {
      if (!isUsed()) {
        const answer = await fetch(location.href, { headers: { "If-None-Match": stamp }, cache: "no-store" });
        if (!answer.ok && answer.status !== 304) throw new Error(answer.statusText);
        if (answer.ok && stamp) put(await answer.text());
        stamp = answer.headers.get("ETag") ?? stamp;
        if (about()) about().hidden = true;
      }
    } catch (error) {
      if (about()) {
        about().hidden = false;
        about().textContent = `The server does not answer (${error.message}); this is what it said last.`;
      }
    }
    setTimeout(renew, EVERY_MS);
  };
  setTimeout(renew, EVERY_MS);
})();
