"use strict";
// A page that is busy says so: a plan takes seconds.
document.addEventListener("submit", (event) => {
  const button = event.submitter;
  if (button && button.dataset.busy) {
    button.textContent = button.dataset.busy;
    setTimeout(() => { button.disabled = true; });
  }
});
document.addEventListener("click", (event) => {
  if (!event.target.matches("[data-copy]")) return;
  navigator.clipboard.writeText(event.target.parentElement.querySelector("pre").textContent);
  event.target.textContent = "Copied";
});
// Load the parts that change again, every two seconds, and replace those that did.
async function refresh(live) {
  if (!document.hidden && !document.querySelector(".tip")) {
    try {
      const answer = await fetch(live.dataset.live);
      document.body.classList.toggle("offline", answer.status === 403);  // a new server has a new token
      if (answer.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const part of live.querySelectorAll("[data-part]")) {
          const fresh = page.querySelector(`[data-part="${part.dataset.part}"]`);
          if (fresh && part.dataset.part === "buttons") {
            if (fresh.textContent === part.textContent) continue;
            fresh.querySelectorAll("input").forEach((input) => input.remove());
            fresh.querySelector("form").append(...part.querySelectorAll("input"));
          }
          if (fresh && fresh.innerHTML !== part.innerHTML) part.replaceChildren(...fresh.childNodes);
        }
      }
    } catch { document.body.classList.add("offline"); }
  }
  setTimeout(refresh, 2000, live);
}
document.querySelectorAll("[data-live]").forEach((live) => setTimeout(refresh, 2000, live));
// The values below the pointer.
document.addEventListener("pointermove", (event) => {
  const plot = event.target.closest(".plot");
  document.querySelectorAll(".tip, .cursor").forEach((old) => old.remove());
  if (!plot) return;
  const box = plot.getBoundingClientRect(), at = 100 * (event.clientX - box.left) / box.width;
  if (at < 0 || at > 100) return;
  const tip = document.createElement("div"), cursor = document.createElement("div");
  tip.className = "tip";
  cursor.className = "cursor";
  let place;
  for (const series of JSON.parse(plot.dataset.series)) {
    if (!series.values.length) continue;
    const value = series.values.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
    place ??= value;
    const line = document.createElement("div"), swatch = document.createElement("i");
    swatch.className = `c${series.colour}`;
    line.append(swatch, `${series.name}: ${value[2]}${value[1] === place[1] ? "" : ` (iteration ${value[1]})`}`);
    tip.append(line);
  }
  if (!place) return;
  tip.prepend(`iteration ${place[1]}`);
  cursor.style.left = `${place[0]}%`;
  tip.style[at < 50 ? "left" : "right"] = at < 50 ? `calc(${place[0]}% + 10px)` : `calc(${100 - place[0]}% + 10px)`;
  plot.append(cursor, tip);
});
