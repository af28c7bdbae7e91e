package httpapi

import (
	"context"
	"errors"
	"math/big"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/labstack/echo/v4"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/invoices"
	"github.com/onceledger/onceledger/internal/ledger"
	"github.com/onceledger/onceledger/internal/money"
)

func (a *API) getInvoice(c echo.Context) error {
	id, err := pathID(c, invoices.ErrNotFound)
	if err != nil {
		return err
	}
	return a.read(c, func(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID) (any, error) {
		invoice, err := invoices.GetTx(ctx, tx, tenantID, id)
		return invoiceBody(invoice), err
	})
}

var errQuery = failure.New(failure.Invalid, "query-invalid", "The query is not one that can be answered.")

func queryID(c echo.Context, name string) (uuid.UUID, error) {
	id, err := uuid.Parse(c.QueryParam(name))
	if err != nil {
		return uuid.Nil, errQuery.WithFields(failure.Field{Field: name, Detail: "must be a UUID"})
	}
	return id, nil
}

// listInvoices answers with the invoice of an order, or with none yet.
func (a *API) listInvoices(c echo.Context) error {
	orderID, err := queryID(c, "order_id")
	if err != nil {
		return err
	}
	return a.read(c, func(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID) (any, error) {
		answer := struct {
			Invoices []invoiceResponse `json:"invoices"`
		}{Invoices: []invoiceResponse{}}
		invoice, err := invoices.GetByOrderTx(ctx, tx, tenantID, orderID)
		if errors.Is(err, invoices.ErrNotFound) {
			return answer, nil
		}
		answer.Invoices = append(answer.Invoices, invoiceBody(invoice))
		return answer, err
	})
}

// listEntries answers with an order's ledger entries, or with a page of those
// that touch an account.
func (a *API) listEntries(c echo.Context) error {
	account := c.QueryParam("account")
	if byOrder := c.QueryParam("order_id") != ""; byOrder == (account != "") {
		return errQuery.Withf("Give either order_id or account.")
	}
	if !isText(account) {
		return errQuery.WithFields(failure.Field{Field: "account", Detail: "must be the code of an account"})
	}
	if account != "" {
		return a.listAccountEntries(c, account)
	}
	orderID, err := queryID(c, "order_id")
	if err != nil {
		return err
	}
	return a.read(c, func(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID) (any, error) {
		entries, err := ledger.EntriesByOrderTx(ctx, tx, tenantID, orderID)
		return entriesResponse{Entries: entryBodies(entries)}, err
	})
}

func (a *API) listAccountEntries(c echo.Context, account string) error {
	before, limit, err := page(c)
	if err != nil {
		return err
	}
	return a.read(c, func(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID) (any, error) {
		entries, err := ledger.EntriesByAccountTx(ctx, tx, tenantID, account, before, limit)
		if err != nil {
			return nil, err
		}
		answer := entriesResponse{Entries: entryBodies(entries)}
		if len(entries) == limit {
			answer.NextCursor = cursor(entries[limit-1].EventID)
		}
		return answer, nil
	})
}

// isText tells whether Postgres would take a text from an address for one.
func isText(text string) bool { return utf8.ValidString(text) && !strings.ContainsRune(text, 0) }

func (a *API) getBalance(c echo.Context) error {
	if !isText(c.Param("code")) {
		return ledger.ErrAccountNotFound
	}
	currency, err := money.ParseCurrency(c.QueryParam("currency"))
	if err != nil {
		return err
	}
	return a.read(c, func(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID) (any, error) {
		balance, err := ledger.BalanceTx(ctx, tx, tenantID, c.Param("code"), currency)
		return balanceResponse(balance), err
	})
}

func (a *API) getTrialBalance(c echo.Context) error {
	type total struct {
		Currency money.Currency `json:"currency"`
		Debit    *big.Int       `json:"debit_amount"`
		Credit   *big.Int       `json:"credit_amount"`
		Balanced bool           `json:"balanced"`
	}
	return a.read(c, func(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID) (any, error) {
		balances, err := ledger.TrialBalanceTx(ctx, tx, tenantID)
		if err != nil {
			return nil, err
		}
		answer := struct {
			Accounts []balanceResponse `json:"accounts"`
			Totals   []total           `json:"totals"`
		}{Accounts: []balanceResponse{}, Totals: []total{}}
		for _, balance := range balances { // sorted by currency
			answer.Accounts = append(answer.Accounts, balanceResponse(balance))
			last := len(answer.Totals) - 1
			if last < 0 || answer.Totals[last].Currency != balance.Currency {
				answer.Totals = append(answer.Totals, total{Currency: balance.Currency, Debit: new(big.Int), Credit: new(big.Int)})
				last++
			}
			sum := &answer.Totals[last]
			sum.Debit.Add(sum.Debit, balance.Debit)
			sum.Credit.Add(sum.Credit, balance.Credit)
			sum.Balanced = sum.Debit.Cmp(sum.Credit) == 0
		}
		return answer, nil
	})
}

type invoiceResponse struct {
	ID            uuid.UUID      `json:"id"`
	Number        string         `json:"number"`
	OrderID       uuid.UUID      `json:"order_id"`
	CustomerID    string         `json:"customer_id"`
	CustomerEmail string         `json:"customer_email"`
	Currency      money.Currency `json:"currency"`
	Lines         []event.Line   `json:"lines"`
	Taxes         []event.Tax    `json:"taxes"`
	NetAmount     int64          `json:"net_amount"`
	TaxAmount     int64          `json:"tax_amount"`
	TotalAmount   int64          `json:"total_amount"`
	PaidAt        time.Time      `json:"paid_at"`
	IssuedAt      time.Time      `json:"issued_at"`
}

func invoiceBody(i invoices.Invoice) invoiceResponse {
	return invoiceResponse{
		ID: i.ID, Number: i.FullNumber(), OrderID: i.OrderID,
		CustomerID: i.CustomerID, CustomerEmail: i.CustomerEmail, Currency: i.Currency,
		Lines: i.Lines, Taxes: i.Taxes,
		NetAmount: i.NetAmount, TaxAmount: i.TaxAmount, TotalAmount: i.TotalAmount,
		PaidAt: i.PaidAt, IssuedAt: i.IssuedAt,
	}
}

type creditNoteResponse struct {
	ID          uuid.UUID      `json:"id"`
	Number      string         `json:"number"`
	InvoiceID   uuid.UUID      `json:"invoice_id"`
	RefundID    uuid.UUID      `json:"refund_id"`
	Currency    money.Currency `json:"currency"`
	Taxes       []event.Tax    `json:"taxes"`
	NetAmount   int64          `json:"net_amount"`
	TaxAmount   int64          `json:"tax_amount"`
	TotalAmount int64          `json:"total_amount"`
	Reason      string         `json:"reason"`
	RefundedAt  time.Time      `json:"refunded_at"`
	IssuedAt    time.Time      `json:"issued_at"`
}

func creditNoteBodies(notes []invoices.CreditNote) []creditNoteResponse {
	bodies := make([]creditNoteResponse, len(notes))
	for i, n := range notes {
		bodies[i] = creditNoteResponse{
			ID: n.ID, Number: n.FullNumber(), InvoiceID: n.InvoiceID, RefundID: n.RefundID,
			Currency: n.Currency, Taxes: n.Taxes,
			NetAmount: n.NetAmount, TaxAmount: n.TaxAmount, TotalAmount: n.TotalAmount,
			Reason: n.Reason, RefundedAt: n.RefundedAt, IssuedAt: n.IssuedAt,
		}
	}
	return bodies
}

type entriesResponse struct {
	Entries    []entryResponse `json:"entries"`
	NextCursor *string         `json:"next_cursor,omitempty"`
}

type entryResponse struct {
	EventID     uuid.UUID      `json:"event_id"`
	Kind        ledger.Kind    `json:"kind"`
	OrderID     uuid.UUID      `json:"order_id"`
	Currency    money.Currency `json:"currency"`
	Reverses    *uuid.UUID     `json:"reverses,omitempty"`
	EffectiveAt time.Time      `json:"effective_at"`
	RecordedAt  time.Time      `json:"recorded_at"`
	Lines       []lineResponse `json:"lines"`
}

type lineResponse struct {
	Debit  string `json:"debit_account"`
	Credit string `json:"credit_account"`
	Amount int64  `json:"amount"`
}

func entryBodies(entries []ledger.Entry) []entryResponse {
	bodies := make([]entryResponse, len(entries))
	for i, e := range entries {
		bodies[i] = entryResponse{
			EventID: e.EventID, Kind: e.Kind, OrderID: e.OrderID, Currency: e.Currency, Reverses: e.Reverses,
			EffectiveAt: e.EffectiveAt, RecordedAt: e.RecordedAt,
		}
		for _, line := range e.Lines {
			bodies[i].Lines = append(bodies[i].Lines, lineResponse(line))
		}
	}
	return bodies
}

type balanceResponse struct {
	Account  string         `json:"account"`
	Kind     string         `json:"kind"`
	Currency money.Currency `json:"currency"`
	Debit    *big.Int       `json:"debit_amount"`
	Credit   *big.Int       `json:"credit_amount"`
	Minor    *big.Int       `json:"balance_amount"`
}
