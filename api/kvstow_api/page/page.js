(() => {
  const told = document.getElementById("live");
  const parts = document.querySelectorAll("header[id], section[id]");
  const name = () => { document.title = `kvstow: ${document.querySelector(".pill").textContent}`; };
  const connect = () => {
    const source = new EventSource("page/live");
    source.onopen = () => {
      told.textContent = "live";
      document.body.classList.remove("lost");
      name();
    };
    source.onerror = () => {
      if (!document.body.classList.contains("lost"))
        told.textContent = `no answer since ${new Date().toLocaleTimeString()}: what you see is older. Trying again`;
      document.body.classList.add("lost");
      document.title = "kvstow: no answer";
      if (source.readyState === EventSource.CLOSED) setTimeout(connect, 5000);
    };
    for (const part of parts) source.addEventListener(part.id, (event) => {
      part.innerHTML = event.data;
      if (part.id === "state") name();
    });
  };
  connect();
})();
