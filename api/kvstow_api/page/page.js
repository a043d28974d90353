(() => {
  const status = document.getElementById("live");
  const parts = document.querySelectorAll("header[id], section[id]");
  const title = (words) => { document.title = `kvstow ${document.querySelector(".host").textContent}: ${words}`; };
  const name = () => title(document.querySelector(".pill").textContent);
  const current = (words) => {
    status.textContent = words;
    document.body.classList.remove("lost");
    name();
  };
  const lost = (what) => {
    if (!document.body.classList.contains("lost"))
      status.textContent = `${what} since ${new Date().toLocaleTimeString()}: the figures are outdated. Retrying`;
    document.body.classList.add("lost");
    title(what);
  };
  const read = async () => {
    let answer;
    try {
      answer = await fetch(`./${location.search}`, { cache: "no-store" });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (!answer.ok) return lost(`refused (${answer.status})`);
      for (const part of parts) part.innerHTML = page.getElementById(part.id).innerHTML;
      current("updated every 5 s: too many open status pages");
    } catch {
      lost("no answer");
    }
  };
  const connect = () => {
    const source = new EventSource(`page/live${location.search}`);
    source.onopen = () => current("live");
    source.onerror = () => {
      if (source.readyState !== EventSource.CLOSED) return lost("no answer");
      read();
      setTimeout(connect, 5000);
    };
    for (const part of parts) source.addEventListener(part.id, (event) => {
      part.innerHTML = event.data;
      if (part.id === "state") name();
    });
  };
  connect();
})();
